// What translated PTX is compiled with (oracles/ptx.py): types, the memory that a launch may touch, and instructions
// that are more than an operator, written as NVIDIA's "Parallel Thread Execution ISA" describes them.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

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

enum Refusal : u32 { NOTHING, READS, WRITES };

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
#define param_holds(launch, hint, at, size, mode) \
  ((at) >= (u64)param && (at) + (size) <= (u64)param + parameter_bytes && ((at) - (u64)param) % (size) == 0)
#define local_holds(launch, hint, at, size, mode) \
  ((at) >= (u64)local && (at) + (size) <= (u64)local + sizeof local && (at) % (size) == 0)
#define generic_holds(launch, hint, at, size, mode) \
  (local_holds(launch, hint, at, size, mode) || global_holds(launch, hint, at, size, mode))
#define shared_holds(launch, hint, at, size, mode) ((at) + (size) <= shared_bytes && (at) % (size) == 0)

static int refused(Launch *launch, u32 ctaid, u32 tid, u64 at, u32 size, Refusal mode, u32 line) {
  launch->refusal = mode;
  launch->line = line;
  launch->ctaid = ctaid;
  launch->tid = tid;
  launch->size = size;
  launch->address = at;
  return 1;
}
#define HOLD(space, size, mode, line)                \
  static u32 hint;                                   \
  (void)hint;                                        \
  if (!space##_holds(launch, &hint, at, size, mode)) \
    return refused(launch, ctaid, tid, at, size, mode, line);
#define LOAD(type, place, slot)                      \
  {                                                  \
    type moved;                                      \
    memcpy(&moved, (void *)(place), sizeof moved);   \
    slot = moved;                                    \
  }
#define STORE(type, place, slot)                     \
  {                                                  \
    const type moved = slot;                         \
    memcpy((void *)(place), &moved, sizeof moved);   \
  }

static inline void poison(u8 *memory, u64 size) { memset(memory, (u8)POISON, size); }

// A block's threads run one after another, each up to its next barrier or its end.
struct Thread {
  ucontext_t context;
  u32 ended, refused;
};
constexpr u32 STACK = 1 << 18;
static Thread threads[1024];
static ucontext_t scheduler;
static void (*entered)(u32);
static u32 entering;

static inline void wait_for_others(u32 tid) { swapcontext(&threads[tid].context, &scheduler); }
static void enter() { entered(entering); }

static int run_block(u32 block, bool backwards, u8 *stacks, void (*entry)(u32)) {
  entered = entry;
  for (u32 tid = 0; tid < block; ++tid) {
    Thread &thread = threads[tid];
    thread.ended = thread.refused = 0;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks + (u64)tid * STACK;
    thread.context.uc_stack.ss_size = STACK;
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, enter, 0);
  }
  for (u32 running = block; running;) {
    for (u32 n = 0; n < block; ++n) {
      Thread &thread = threads[entering = backwards ? block - 1 - n : n];
      if (thread.ended) continue;
      swapcontext(&scheduler, &thread.context);
      if (thread.refused) return 1;
      running -= thread.ended;
    }
  }
  return 0;
}

#define LAUNCH(name)                                                                              \
  static const u8 *param_##name;                                                                  \
  static Launch *launch_of_##name;                                                                \
  static u32 block_of_##name;                                                                     \
  static void enter_##name(u32 tid) {                                                             \
    threads[tid].refused = thread_##name(param_##name, launch_of_##name, block_of_##name, tid);   \
    threads[tid].ended = 1;                                                                       \
  }                                                                                               \
  extern "C" int launch_##name(const u8 *param, Launch *launch) {                                 \
    param_##name = param;                                                                         \
    launch_of_##name = launch;                                                                    \
    u8 *stacks = (u8 *)malloc((u64)launch->block * STACK);                                        \
    int refused = 0;                                                                              \
    for (u32 n = 0; n < launch->grid && !refused; ++n) {                                          \
      block_of_##name = launch->backwards ? launch->grid - 1 - n : n;                             \
      poison(shared_##name, sizeof shared_##name);                                                \
      refused = run_block(launch->block, launch->backwards, stacks, enter_##name);                \
    }                                                                                             \
    free(stacks);                                                                                 \
    return refused;                                                                               \
  }

// -- Instructions -----------------------------------------------------------------------------------------------------

// A NaN is less than any number, and -0 less than +0.
static inline f32 greatest(f32 a, f32 b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return bits(a) & 0x80000000u ? b : a;
  return a > b ? a : b;
}

// Rounded towards zero, in the range of a 32-bit integer; NaN gives 0.
static inline s32 saturated(f32 x) {
  if (x != x) return 0;
  if (x >= 2147483648.0f) return INT32_MAX;
  return x <= -2147483648.0f ? INT32_MIN : (s32)x;
}

// The low bits of a, `length` of them, put into b from bit `first` on.
static inline u32 bfi(u32 a, u32 b, u32 first, u32 length) {
  first &= 0xff;
  length &= 0xff;
  for (u32 i = 0; i < length && first + i < 32; ++i) b = (b & ~(1u << (first + i))) | (a >> i & 1) << (first + i);
  return b;
}
