// Whether this processor has what the rest of this folder is built for.
#pragma once

namespace baton {

// Null, or why not. To be asked before anything else of this folder runs.
inline const char* why_no_vectors() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512bf16")) {
        return "this CPU lacks AVX-512 with bfloat16";
    }
    return nullptr;
}

}  // namespace baton
