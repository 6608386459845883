// An AttendCase (attend_case.h) in memory the GPU reads, and the kernels run over it.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "../../csrc/params.h"
#include "attend_case.h"

namespace directkv::test {

enum class Placement { kDevice, kPinned, kPool };
const char* name(Placement placement);
const std::vector<Placement>& placements();  // those this build and machine can test

// --quick: few small cases, for compute-sanitizer.
bool quick();
void set_quick();

// Prints and ends the process: the tests after a CUDA error would all fail with it.
void cuda_check(cudaError_t status, const char* call, const char* file, int line);
#define CUDA_CHECK(call) ::directkv::test::cuda_check((call), #call, __FILE__, __LINE__)

// Memory of exactly `bytes` followed by a guard that the destructor checks.
class Buffer {
 public:
  Buffer(size_t bytes, Placement placement);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* get() const { return data_; }
  void upload(const void* from) { upload(from, bytes_); }
  void upload(const void* from, size_t bytes);
  void download(void* to) const;

 private:
  Placement placement_;
  size_t bytes_;
  char* data_ = nullptr;
  void* pool_ = nullptr;
};

// Uploads a case once; params() points into device memory and lives as long as this.
class DeviceCase {
 public:
  DeviceCase(AttendCase& c, Placement placement);

  AttendParams params() const;
  AppendParams append_params() const;
  void upload_pages();
  void upload_bookkeeping();  // lengths, seq_lengths, page_table, layer
  void poison();              // outputs and workspace

  // Poison, run, download out and lse into the case; also checks that `pages` stayed as they were.
  void attend(cudaStream_t stream = nullptr);
  void append(cudaStream_t stream = nullptr);  // downloads the pages into the case
  void download_outputs();

 private:
  AttendCase& case_;
  Placement placement_;
  Buffer pages_, table_, lengths_, seq_lengths_, layer_, query_, key_, value_, out_, lse_,
      workspace_;
};

}  // namespace directkv::test
