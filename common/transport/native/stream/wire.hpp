// The frames of a stream, in the byte order of the machines that run this: little endian.
//
//     writer -> target   Hello (without TLS only), then frames: FrameHead, its runs, their bytes
//     target -> writer   an Ack for the hello or the TLS handshake, then one for every frame stored
//
// A run names a region by its number among those that the target opened for this writer, and an offset
// in it. Nothing names an address.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace baton {

static_assert(std::endian::native == std::endian::little, "frames are little endian");

constexpr size_t TARGET_ID_NBYTES = 16;
constexpr size_t SECRET_NBYTES = 32;
using TargetId = std::array<unsigned char, TARGET_ID_NBYTES>;
using Secret = std::array<unsigned char, SECRET_NBYTES>;

constexpr uint64_t HELLO_MAGIC = 0x31302d4e4f544142;  // "BATON-01"
constexpr uint32_t FRAME_MAGIC = 0x4d415246;          // "FRAM"

// One system call takes so many pieces of memory; half of the kernel's limit, which a call reaches anyway.
constexpr uint32_t RUN_COUNT_MAX = 512;
// A frame is the unit of fairness between transfers, of cancelling, and of acknowledging.
constexpr uint64_t FRAME_NBYTES_MAX = 2ull << 20;

struct Hello {
    uint64_t magic;
    TargetId target;
    Secret secret;
};

struct FrameHead {
    uint32_t magic;
    uint32_t run_count;  // 1..RUN_COUNT_MAX
    uint64_t nbytes;     // of all runs together, 1..FRAME_NBYTES_MAX
    uint64_t sequence;   // 1, 2, 3, ... on each connection
};

struct WireRun {
    uint32_t region;
    uint32_t nbytes;  // at least 1
    uint64_t offset;
};

struct Ack {
    uint64_t sequence;  // of the frame; 0 when the connection is ready
};

static_assert(sizeof(Hello) == 56 && sizeof(FrameHead) == 24 && sizeof(WireRun) == 16 && sizeof(Ack) == 8);

}  // namespace baton
