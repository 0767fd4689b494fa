// Maps memory of other ranks by torch's symmetric memory, without the GIL. torch's own binding
// holds the GIL until all ranks have come. A rank that died before would then freeze the others,
// with their timeouts and signal handlers.
#include "cuda/bindings/bindings.hpp"

#include <c10/util/env.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <chrono>
#include <mutex>
#include <string>

#include "torch/error.hpp"

namespace py = pybind11;

namespace fastcoll {
namespace {

using c10d::symmetric_memory::SymmetricMemory;

constexpr const char* kOverlapping = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES";
constexpr const char* kNoMulticast = "TORCH_SYMM_MEM_DISABLE_MULTICAST";

/// Sets an environment variable to "1" during its lifetime. Afterwards it has its former value, or
/// "0" (torch's default) if it was unset. It is not removed, because that would move other
/// variables, which NCCL's threads may read meanwhile. If it was set before, the change replaces
/// one pointer.
class Switched {
 public:
  explicit Switched(const char* name)
      : name_(name), before_(c10::utils::get_env(name).value_or("0")) {
    c10::utils::set_env(name, "1");
  }
  ~Switched() { c10::utils::set_env(name_, before_.c_str()); }
  Switched(const Switched&) = delete;
  Switched& operator=(const Switched&) = delete;

 private:
  const char* const name_;
  const std::string before_;
};

at::Tensor emptySymmetric(int64_t bytes, const c10::Device& device) {
  return c10d::symmetric_memory::empty_strided_p2p({bytes}, {1}, at::kByte, device, std::nullopt,
                                                   std::nullopt);
}

/// One at a time in a process: torch names its socket for passing memory after the process alone,
/// and reads the environment.
c10::intrusive_ptr<SymmetricMemory> rendezvous(const at::Tensor& memory, const std::string& group,
                                               double seconds) {
  static std::timed_mutex one;
  const std::unique_lock<std::timed_mutex> lock(one, std::chrono::duration<double>(seconds));
  if (!lock) {
    throw Error(ErrorKind::Backend, "another group of this process has been mapping memory for ",
                seconds, " s, and has not ended");
  }
  // torch compares devices by host and index, so it refuses ranks that each see only one GPU, as
  // index 0. The caller has already compared the GPUs' identities. No kernel of ours uses the
  // multicast object, and making it can hang.
  const Switched overlapping(kOverlapping), noMulticast(kNoMulticast);
  return c10d::symmetric_memory::rendezvous(memory, group);
}

}  // namespace

void bindSymmetricMemory(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("symmetric_empty", &emptySymmetric, py::arg("bytes"), py::arg("device"), Unlocked());
  // torch waits for the whole device before it unmaps memory.
  m.def(
      "symmetric_free",
      [](const at::Tensor& memory) {
        memory.storage().set_data_ptr(at::DataPtr(nullptr, memory.device()));
      },
      py::arg("memory"), Unlocked());
  m.def(
      "symmetric_rendezvous",
      [](const at::Tensor& memory, const std::string& group, double seconds) {
        return translated([&] { return rendezvous(memory, group, seconds); });
      },
      py::arg("memory"), py::arg("group"), py::arg("seconds"), Unlocked());
}

}  // namespace fastcoll
