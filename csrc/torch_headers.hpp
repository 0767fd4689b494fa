// The torch headers that most files of the process group include, compiled once as a precompiled
// header (build_backend/extension.py). No file names it; each includes what it needs. pybind11 is
// left out: with it each file takes twice as long to compile, because of templates instantiated at
// the end.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
