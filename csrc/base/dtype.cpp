#include "dtype.hpp"

namespace fastcoll {

std::size_t elementSize(DType dtype) {
  switch (dtype) {
    case DType::UInt16:
    case DType::Int16:
    case DType::Float16:
    case DType::BFloat16:
      return 2;
    case DType::UInt32:
    case DType::Int32:
    case DType::Float32:
    case DType::Complex32:
      return 4;
    case DType::UInt64:
    case DType::Int64:
    case DType::Float64:
    case DType::Complex64:
      return 8;
    case DType::Complex128:
      return 16;
    default:
      return 1;
  }
}

DType partOf(DType dtype) {
  switch (dtype) {
    case DType::Complex32:
      return DType::Float16;
    case DType::Complex64:
      return DType::Float32;
    case DType::Complex128:
      return DType::Float64;
    default:
      return dtype;
  }
}

const char* dtypeName(DType dtype) {
  switch (dtype) {
    case DType::UInt8:
      return "uint8";
    case DType::Int8:
      return "int8";
    case DType::UInt16:
      return "uint16";
    case DType::Int16:
      return "int16";
    case DType::UInt32:
      return "uint32";
    case DType::Int32:
      return "int32";
    case DType::UInt64:
      return "uint64";
    case DType::Int64:
      return "int64";
    case DType::Bool:
      return "bool";
    case DType::Float16:
      return "float16";
    case DType::BFloat16:
      return "bfloat16";
    case DType::Float32:
      return "float32";
    case DType::Float64:
      return "float64";
    case DType::Complex64:
      return "complex64";
    case DType::Complex128:
      return "complex128";
    case DType::Complex32:
      return "complex32";
    case DType::Float8E5M2:
      return "float8_e5m2";
    case DType::Float8E4M3FN:
      return "float8_e4m3fn";
    case DType::Float8E5M2FNUZ:
      return "float8_e5m2fnuz";
    case DType::Float8E4M3FNUZ:
      return "float8_e4m3fnuz";
    case DType::Float8E8M0FNU:
      return "float8_e8m0fnu";
    case DType::Opaque:
      return "bytes";
  }
  return "unknown";
}

const char* reduceOpName(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return "SUM";
    case ReduceOp::Avg:
      return "AVG";
    case ReduceOp::Product:
      return "PRODUCT";
    case ReduceOp::Min:
      return "MIN";
    case ReduceOp::Max:
      return "MAX";
    case ReduceOp::BitAnd:
      return "BAND";
    case ReduceOp::BitOr:
      return "BOR";
    case ReduceOp::BitXor:
      return "BXOR";
    case ReduceOp::PreMulSum:
      return "PREMUL_SUM";
    case ReduceOp::None:
      return "-";
  }
  return "unknown";
}

}  // namespace fastcoll
