// Element types and reductions. Floating-point types of 16 and 8 bits are reduced as float and
// rounded once, to even.
#include <math.h>
#include <string.h>

#include "fake_nccl.h"

size_t type_bytes(int type) {
  static const size_t bytes[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type < 0 || type >= TYPES ? 0 : bytes[type];
}

/// A small binary floating-point format.
typedef struct {
  int mantissa, bias;
  unsigned sign,
      infinity;  // sign bit; bits of infinity, or of NaN if there is no infinity
  float largest;
} Format;

static const Format formats[TYPES] = {
    [HALF] = {10, 15, 0x8000, 0x7c00, 65504.f},
    [E4M3] = {3, 7, 0x80, 0x7f, 448.f},
    [E5M2] = {2, 15, 0x80, 0x7c, 57344.f},
};

static float decode(const Format* format, unsigned bits) {
  const float sign = bits & format->sign ? -1.f : 1.f;
  const unsigned magnitude = bits & (format->sign - 1);
  const bool has_infinity = format->largest != 448.f;
  if (has_infinity ? magnitude > format->infinity : magnitude == format->infinity) return NAN;
  if (has_infinity && magnitude == format->infinity) return sign * INFINITY;
  const int exponent = (int)(magnitude >> format->mantissa);
  const unsigned fraction = magnitude & ((1u << format->mantissa) - 1);
  const unsigned whole = exponent ? fraction | 1u << format->mantissa : fraction;
  return sign * ldexpf((float)whole, (exponent ? exponent : 1) - format->bias - format->mantissa);
}

static unsigned encode(const Format* format, float value) {
  const unsigned sign = signbit(value) ? format->sign : 0;
  if (isnan(value)) return sign | (format->sign - 1);
  float magnitude = fabsf(value);
  if (magnitude == 0) return sign;
  int exponent;
  frexpf(magnitude, &exponent);
  exponent = exponent - 1 < 1 - format->bias ? 1 - format->bias : exponent - 1;
  const float quantum = ldexpf(1.f, exponent - format->mantissa);
  magnitude = nearbyintf(magnitude / quantum) * quantum;
  if (!(magnitude <= format->largest)) {  // the 8-bit types saturate
    return sign | (format->mantissa == 10 ? format->infinity : encode(format, format->largest));
  }
  // If rounding reaches the next power of two, the addition carries into the exponent.
  const unsigned steps = (unsigned)(magnitude / quantum);
  const unsigned first =
      exponent == 1 - format->bias ? 0u : (unsigned)(exponent + format->bias - 1);
  return sign | ((first << format->mantissa) + steps);
}

static float load_bfloat16(const uint16_t* address) {
  const uint32_t bits = (uint32_t)*address << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static void store_bfloat16(uint16_t* address, float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  *address = isnan(value) ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

double load(int type, const void* address) {
  switch (type) {
    case INT8:
      return *(const int8_t*)address;
    case UINT8:
      return *(const uint8_t*)address;
    case INT32:
      return *(const int32_t*)address;
    case UINT32:
      return *(const uint32_t*)address;
    case INT64:
      return (double)*(const int64_t*)address;
    case UINT64:
      return (double)*(const uint64_t*)address;
    case HALF:
      return decode(&formats[type], *(const uint16_t*)address);
    case FLOAT:
      return *(const float*)address;
    case DOUBLE:
      return *(const double*)address;
    case BFLOAT16:
      return load_bfloat16(address);
    default:
      return decode(&formats[type], *(const uint8_t*)address);
  }
}

// Reduces each element in rank order. Wide is the accumulate type; UNORDERED is true for a NaN.
#define REDUCE(Narrow, Wide, LOAD, STORE, AVERAGE, UNORDERED)  \
  for (size_t i = 0; i < count; ++i) {                         \
    Wide total = 0;                                            \
    for (int rank = 0; rank < ranks; ++rank) {                 \
      const Narrow* element = (const Narrow*)inputs[rank] + i; \
      Wide value = LOAD;                                       \
      if (op == PREMUL) value *= (Wide)factors[rank];          \
      if (rank == 0) {                                         \
        total = value;                                         \
      } else if (op == PROD) {                                 \
        total *= value;                                        \
      } else if (op == MAX) {                                  \
        total = value > total || UNORDERED ? value : total;    \
      } else if (op == MIN) {                                  \
        total = value < total || UNORDERED ? value : total;    \
      } else {                                                 \
        total += value;                                        \
      }                                                        \
    }                                                          \
    if (op == AVG) total = AVERAGE;                            \
    Narrow* element = (Narrow*)out + i;                        \
    STORE;                                                     \
  }                                                            \
  break
#define INTEGER(Narrow, Wide)                                      \
  REDUCE(Narrow, Wide, (Wide) * element, *element = (Narrow)total, \
         (Wide)((Narrow)total / (Narrow)ranks), 0)
// Unsigned sums and products wrap; only comparison needs the sign.
#define SIGNED(Narrow, Unsigned) \
  if (op == MAX || op == MIN) {  \
    INTEGER(Narrow, Narrow);     \
  }                              \
  INTEGER(Narrow, Unsigned)
#define REAL(Narrow, Wide, LOAD, STORE) \
  REDUCE(Narrow, Wide, LOAD, STORE, total / (Wide)ranks, isnan(value))
#define SMALL(Narrow)                                   \
  REAL(Narrow, float, decode(&formats[type], *element), \
       *element = (Narrow)encode(&formats[type], total))

void reduce(void* out, int ranks, const void* const inputs[], const double factors[], size_t count,
            int type, int op) {
  switch (type) {
    case INT8:
      SIGNED(int8_t, uint32_t);
    case INT32:
      SIGNED(int32_t, uint32_t);
    case INT64:
      SIGNED(int64_t, uint64_t);
    case UINT8:
      INTEGER(uint8_t, uint32_t);
    case UINT32:
      INTEGER(uint32_t, uint32_t);
    case UINT64:
      INTEGER(uint64_t, uint64_t);
    case HALF:
      SMALL(uint16_t);
    case FLOAT:
      REAL(float, float, *element, *element = total);
    case DOUBLE:
      REAL(double, double, *element, *element = total);
    case BFLOAT16:
      REAL(uint16_t, float, load_bfloat16(element), store_bfloat16(element, total));
    case E4M3:
    case E5M2:
      SMALL(uint8_t);
    default:
      break;
  }
}
