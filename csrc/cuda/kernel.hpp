// Kernels and launches of them. Triton compiles a kernel, and the CUDA driver loads and launches
// its machine code; no launch takes the GIL. Tests without a GPU launch functions of the host
// instead.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fastcoll {

/// The arguments of a kernel in order, its constants left out. A 32-bit argument is the lower half
/// of its number.
using KernelArguments = std::vector<std::int64_t>;

class Kernel {
 public:
  virtual ~Kernel() = default;
  /// Puts `programs` programs on a stream of the kernel's device, whatever device is current.
  virtual void launch(unsigned programs, const KernelArguments& arguments, void* stream) const = 0;
  /// The handle of the current stream of the kernel's device.
  virtual void* currentStream() const = 0;
};

/// Machine code that the driver has loaded on a device. It is never unloaded.
class LoadedKernel : public Kernel {
 public:
  /// What Triton's compiler returns. `name`: of the configuration, for messages; `code`: a cubin;
  /// `threads`: of a program. Throws Error(Backend) if the driver cannot load it.
  LoadedKernel(c10::Device device, std::string name, const std::string& code,
               const std::string& entry, unsigned threads, unsigned sharedBytes);
  void launch(unsigned programs, const KernelArguments& arguments, void* stream) const override;
  void* currentStream() const override;

 private:
  const c10::Device device_;
  const std::string name_;
  const unsigned threads_;
  const unsigned sharedBytes_;
  void* function_ = nullptr;
};

/// How the programs of a launch share a message of any size. A program takes every so-many-th
/// piece.
struct Pieces {
  int at = 0;                 // the argument with the number of programs; elements and piece follow
  std::int64_t block = 1;     // elements: a program with less work is not launched
  std::int64_t grain = 1;     // elements: pieces are multiples of it
  std::int64_t most = 1;      // elements of a piece
  std::int64_t programs = 1;  // at most
};

/// A kernel with its arguments. It can be repeated, and captured in a graph.
struct Launch {
  std::shared_ptr<const Kernel> kernel;
  std::int64_t programs = 0;  // 0 launches nothing; not used with `pieces`
  KernelArguments arguments;
  int sourceAt = -1;   // the argument that a call replaces by its input's address; -1: none
  int outAt = -1;      // the same for the result's address
  int squaresAt = -1;  // the argument, in bytes, to which a call adds its squares' address
  std::optional<Pieces> pieces;
  std::shared_ptr<void> held;  // memory that the arguments refer to

  /// Launches with the arguments as they are.
  void run(void* stream) const { launch(stream, KernelArguments(arguments)); }
  /// Launches for other memory, as aligned and as far apart as that of the arguments. With `pieces`
  /// also for another number of elements.
  void run(void* stream, std::uintptr_t source, std::uintptr_t out, std::int64_t count,
           std::uintptr_t squares) const;

 private:
  void launch(void* stream, KernelArguments&& given) const;
};

}  // namespace fastcoll
