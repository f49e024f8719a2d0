// Whether this processor has what this build of this folder is for. Each is built twice, see CMakeLists.txt.
#pragma once

namespace baton {

// Null, or why not. To be asked before anything else of this folder runs.
inline const char* why_no_vectors() {
    __builtin_cpu_init();
#ifdef BATON_AVX512
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512bf16")) {
        return "this CPU lacks AVX-512 with bfloat16";
    }
#else
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return "this CPU lacks AVX2 with FMA";
#endif
    return nullptr;
}

}  // namespace baton
