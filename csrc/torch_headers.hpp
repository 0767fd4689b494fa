// What most files of the process group include of torch: compiled once, as a precompiled header
// (build_backend/extension.py). No file names it; each includes what it needs. pybind11 is not
// here: each file that has it compiles twice as long, for the templates that it leaves to the end.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
