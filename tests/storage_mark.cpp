// Stand-in for a call that only CUDA builds of torch have (torch/csrc/cuda/Module.cpp):
// torch._C._set_storage_data_ptr_access_error_msg.
#include <c10/core/StorageImpl.h>
#include <cstdint>

extern "C" void mark(std::uintptr_t storage, const char* sentence) {
  auto* impl = reinterpret_cast<c10::StorageImpl*>(storage);
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(sentence));
}
