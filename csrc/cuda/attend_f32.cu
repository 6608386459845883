#include "attend_instances.h"

namespace directkv::cuda {

DIRECTKV_HEAD_DIMS(DIRECTKV_DEFINE_ATTEND, kF32)

}  // namespace directkv::cuda
