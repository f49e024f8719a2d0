// float8_e4m3fn to and from wider floating point, scale 1. Knows nothing of UCX.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baton {

// Rounds to nearest even; values beyond 448, infinities too, become 448; NaN stays NaN.
void narrow_bfloat16(uint8_t* target, const uint16_t* source, size_t count);
void narrow_float32(uint8_t* target, const uint32_t* source, size_t count);

// Exact.
void widen_bfloat16(uint16_t* target, const uint8_t* source, size_t count);
void widen_float32(uint32_t* target, const uint8_t* source, size_t count);

}  // namespace baton
