// What translated PTX is compiled with (oracles/ptx.py): types, the memory that a launch may touch, and instructions
// that are more than an operator, written as NVIDIA's "Parallel Thread Execution ISA" describes them.
#include <cmath>
#include <cstdint>
#include <cstring>

typedef uint8_t u8, b8;
typedef uint16_t u16, b16;
typedef uint32_t u32, b32;
typedef uint64_t u64, b64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef bool pred;

constexpr u64 POISON = 0xAAAAAAAAAAAAAAAA;  // of registers and local memory before they are written

static inline f32 as_f32(u64 wide) {
  u32 bits = (u32)wide;
  f32 x;
  memcpy(&x, &bits, 4);
  return x;
}
static inline u32 bits(f32 x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return bits;
}
static inline u32 canonical(f32 x) { return x != x ? 0x7fffffffu : bits(x); }
static inline pred as_pred(u64 x) { return x != 0; }
#define AS(type) \
  static inline type as_##type(u64 x) { return (type)x; }
AS(u8) AS(u16) AS(u32) AS(u64) AS(s8) AS(s16) AS(s32) AS(s64) AS(b8) AS(b16) AS(b32) AS(b64)

// -- Memory -----------------------------------------------------------------------------------------------------------

enum Refusal : u32 { NOTHING, READS, WRITES, DIVIDED };

struct Region {
  u64 begin, end;
  u64 writable;
};

struct Launch {
  const Region *regions;
  u32 num_regions, grid, block, backwards;
  // Out, where a thread was stopped:
  u32 refusal, line, ctaid, tid, size, reserved;
  u64 address;
};

// Each place in the code remembers the region that it touched last.
static inline bool global_holds(const Launch *launch, u32 *hint, u64 at, u32 size, Refusal mode) {
  for (u32 n = 0; n <= launch->num_regions; ++n) {
    u32 index = n ? n - 1 : *hint;
    if (index >= launch->num_regions) continue;
    const Region &region = launch->regions[index];
    if (at < region.begin || at + size > region.end) continue;
    *hint = index;
    return at % size == 0 && (mode == READS || region.writable);
  }
  return false;
}
#define const_holds global_holds
#define param_holds(launch, hint, at, size, mode) \
  ((at) >= (u64)param && (at) + (size) <= (u64)param + parameter_bytes && ((at) - (u64)param) % (size) == 0)
#define local_holds(launch, hint, at, size, mode) \
  ((at) >= (u64)local && (at) + (size) <= (u64)local + sizeof local && (at) % (size) == 0)
#define generic_holds(...) (local_holds(__VA_ARGS__) || global_holds(__VA_ARGS__))

static int refused(Launch *launch, u32 ctaid, u32 tid, u64 at, u32 size, Refusal mode, u32 line) {
  launch->refusal = mode;
  launch->line = line;
  launch->ctaid = ctaid;
  launch->tid = tid;
  launch->size = size;
  launch->address = at;
  return 1;
}
#define REFUSE(at, size, mode, line) return refused(launch, ctaid, tid, at, size, mode, line);

static inline void poison(u8 *memory, u64 size) { memset(memory, (u8)POISON, size); }

#define LAUNCH(name)                                                     \
  extern "C" int launch_##name(const u8 *param, Launch *launch) {        \
    const u64 threads = (u64)launch->grid * launch->block;               \
    for (u64 n = 0; n < threads; ++n) {                                  \
      const u64 id = launch->backwards ? threads - 1 - n : n;            \
      const u32 ctaid = u32(id / launch->block), tid = id % launch->block; \
      if (thread_##name(param, launch, ctaid, tid)) return 1;            \
    }                                                                    \
    return 0;                                                            \
  }

// -- Instructions -----------------------------------------------------------------------------------------------------

// A NaN is less than any number, and -0 less than +0.
static inline f32 greatest(f32 a, f32 b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return bits(a) & 0x80000000u ? b : a;
  return a > b ? a : b;
}
static inline f32 least(f32 a, f32 b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return bits(a) & 0x80000000u ? a : b;
  return a < b ? a : b;
}

// A whole number brought into the range of an integer of `width` bits; NaN gives 0, or the highest bit of 64.
static inline u64 saturated(f32 whole, int width, bool has_sign) {
  if (whole != whole) return width == 64 ? (u64)1 << 63 : 0;
  f32 beyond = ldexpf(1.0f, width - has_sign);
  u64 most = ~(u64)0 >> (64 - width + has_sign);
  if (whole >= beyond) return most;
  if (has_sign) return whole <= -beyond ? ~most : (u64)(s64)whole;
  return whole <= 0.0f ? 0 : (u64)whole;
}

static inline u64 bfe(u64 a, u32 b, u32 c, int width, bool has_sign) {
  u32 msb = width - 1, pos = b & 0xff, len = c & 0xff;
  u32 last = pos + len - 1 < msb ? pos + len - 1 : msb;
  u64 sbit = has_sign && len != 0 ? a >> last & 1 : 0;
  u64 d = 0;
  for (u32 i = 0; i <= msb; ++i) d |= (i < len && pos + i <= msb ? a >> (pos + i) & 1 : sbit) << i;
  return d;
}

static inline u64 bfi(u64 a, u64 b, u32 c, u32 d, int width) {
  u32 msb = width - 1, pos = c & 0xff, len = d & 0xff;
  u64 f = b;
  for (u32 i = 0; i < len && pos + i <= msb; ++i) f = (f & ~((u64)1 << (pos + i))) | (a >> i & 1) << (pos + i);
  return f;
}

static inline u64 brev(u64 a, int width) {
  u64 d = 0;
  for (int i = 0; i < width; ++i) d |= (a >> i & 1) << (width - 1 - i);
  return d;
}

static inline u32 prmt(u32 a, u32 b, u32 c) {
  u64 pair = (u64)b << 32 | a;
  u32 d = 0;
  for (int i = 0; i < 4; ++i) {
    u32 control = c >> (4 * i) & 0xf;
    u32 byte = pair >> (8 * (control & 7)) & 0xff;
    if (control & 8) byte = byte & 0x80 ? 0xff : 0;
    d |= byte << (8 * i);
  }
  return d;
}

static inline u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 d = 0;
  for (int i = 0; i < 32; ++i) {
    u32 row = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1);
    d |= (table >> row & 1) << i;
  }
  return d;
}
