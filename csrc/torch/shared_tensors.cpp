// The process group's tensors in shared memory, which a caller requests (allocate_tensor).
#include <ATen/ATen.h>

#include "calls/checks.hpp"
#include "process_group.hpp"

namespace fastcoll {

bool ProcessGroupFastcoll::supportsTensorAlloc(c10::DeviceIndex device) {
  if (device >= 0) return false;
  const Settings& settings = engine_->config().settings;
  if (!settings.sharedBuckets) return false;
  // DDP broadcasts before it allocates, so isRemote() is decided by then.
  return size_ > 1 && settings.sharedMemory != "off" && !engine_->isRemote();
}

/// torch allocates buckets through it like any memory, so they need not be shared.
at::Tensor ProcessGroupFastcoll::allocateTensor(long size, at::TensorOptions options) {
  const c10::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  if (c10::isComplexType(dtype)) {
    // DDP's Reducer views complex buckets as pairs of reals (is_complex_bucket, torch 2.11 to
    // 2.15). If a backend has allocated the bucket, it leaves that view out and expects the pairs.
    return allocateTensor(2 * size, options.dtype(c10::toRealValueType(dtype)));
  }
  try {
    return allocateShared(size, options);
  } catch (const c10::DistBackendError& error) {
    log(LogLevel::Warn, "a tensor is not in shared memory: ", error.what_without_backtrace());
  } catch (const std::system_error& error) {  // for example, no thread
    log(LogLevel::Warn, "a tensor is not in shared memory: ", error.what());
  }
  return at::empty({size}, options);
}

at::Tensor ProcessGroupFastcoll::allocateShared(long size, at::TensorOptions options) {
  return translated([&] {
    if (!options.device().is_cpu()) {
      throw Error(ErrorKind::Value, site("allocate_tensor").errorSite(),
                  "expected device cpu, got ", options.device());
    }
    if (size < 0) {
      throw Error(ErrorKind::Value, site("allocate_tensor").errorSite(),
                  "expected a size of at least 0, got ", size);
    }
    engine_->process()->start(engine_->config().settings.arenaBytes);
    std::shared_ptr<Arena> arena = engine_->process()->arena();
    const std::size_t bytes = size * options.dtype().itemsize();
    const std::uint64_t offset = arena->allocateTensor(std::max<std::size_t>(bytes, 1));
    // The tensor keeps the arena, because it may outlive the group and the LocalProcess. A
    // resize (torch's batched_powerSGD_hook pads a bucket) moves it to memory of torch's own
    // allocator.
    c10::DataPtr memory = c10::InefficientStdFunctionContext::makeDataPtr(
        arena->base() + offset, [arena, offset](void*) { arena->release(offset); }, at::kCPU);
    const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory),
                               c10::GetAllocator(c10::kCPU), /*resizable=*/true);
    return at::empty({0}, options).set_(storage, 0, {size}, {1});
  });
}

bool ProcessGroupFastcoll::isShared(const at::Tensor& tensor) const {
  if (!engine_->process()->started()) return false;
  const std::shared_ptr<Arena>& arena = engine_->process()->arena();
  return tensor.is_cpu() && tensor.is_non_overlapping_and_dense() &&
         arena->offsetOf(tensor.const_data_ptr(), tensor.nbytes()) != 0;
}

}  // namespace fastcoll
