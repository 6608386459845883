#include "attend_instances.h"

namespace directkv::cuda {

DIRECTKV_HEAD_DIMS(DIRECTKV_DEFINE_ATTEND, kBF16)

}  // namespace directkv::cuda
