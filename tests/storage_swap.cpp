// Stand-in for a method that torch has since 2.12 (c10::StorageImpl::swap_data_ptr):
// torch.UntypedStorage._swap_data_ptr_. All that it exchanges is private in older versions.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <cstdint>
#include <c10/core/Allocator.h>
#include <c10/core/SymInt.h>
#include <c10/util/intrusive_ptr.h>
#define private public
#define protected public
#include <c10/core/StorageImpl.h>
#undef private
#undef protected

extern "C" void exchange(std::uintptr_t one, std::uintptr_t other) {
  auto* a = reinterpret_cast<c10::StorageImpl*>(one);
  auto* b = reinterpret_cast<c10::StorageImpl*>(other);
  std::swap(a->data_ptr_, b->data_ptr_);
  std::swap(a->size_bytes_, b->size_bytes_);
  std::swap(a->size_bytes_is_heap_allocated_, b->size_bytes_is_heap_allocated_);
  std::swap(a->resizable_, b->resizable_);
  std::swap(a->allocator_, b->allocator_);
  std::swap(a->throw_on_immutable_data_ptr_, b->throw_on_immutable_data_ptr_);
  std::swap(a->throw_on_mutable_data_ptr_, b->throw_on_mutable_data_ptr_);
  std::swap(a->warn_deprecated_on_mutable_data_ptr_, b->warn_deprecated_on_mutable_data_ptr_);
  a->refresh_has_data_ptr_check();
  b->refresh_has_data_ptr_check();
}
