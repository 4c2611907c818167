// Runs a kernel lane by lane and watches what it does.
//
// Every lane of a threadgroup is a fiber with a stack of its own; threadgroups run one after the other. A
// lane runs until it ends or waits in a simdgroup operation or a barrier. Loads and stores call touch()
// first (clang's -fsanitize-coverage), so that a bad one is reported instead of done. The first fault ends
// the run. Floats behave as on the GPU: denormals are flushed, simd_sum is a butterfly over lanes 1, 2, 4,
// 8, 16 apart. In which order a step of matrices adds is not known of any GPU; here one chooses. One run at a
// time, on one thread; no library but libc.
#include "metal_shim.h"

extern "C" {
void* malloc(unsigned long);
void free(void*);
void* memset(void*, int, unsigned long);
void emulator_switch(void** save, void* load);
}

asm(R"(
.text
.globl emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

typedef void (*Entry)(void**);

enum Fault {
  no_fault,
  out_of_range,
  misaligned,
  race,
  read_before_write,
  divergent_simdgroup,
  divergent_barrier,
  out_of_threadgroup_memory,
};

// As in emulator.py.
struct Buffer {
  char* start;
  long size;
  int is_output;
  int initialised;
  long read;
  long written;
};

struct Report {
  int fault;
  int line;
  int lane;
  int group;
  char* address;
  long size;
  int is_store;
};

namespace {

// How a step of matrices adds eight products to c. As in emulator.py.
enum MatrixOrder { ascending, descending, pairwise, halves };

enum State { ready, in_simdgroup, in_barrier, ended };

struct Lane {
  void* stack_pointer;
  Position position;
  State state;
  int operation, argument, line;
  float value;
  metal::vec<float, 2> a, b, c;  // of matrices; c is also the result
  long allocated;  // of the threadgroup memory, by this lane's own count
};

// What is known of one byte that lanes can write.
struct Cell {
  unsigned epoch;  // of the accesses below; barriers start a new one
  int group;       // that accessed it last, from 1
  short writer, reader;
  bool stored;    // by any lane so far
  bool has_value;
};
constexpr short none = -1, several = -2;

struct Memory {
  Buffer* buffer;
  Cell* cells;  // null for what lanes only read
  unsigned epoch;
};

constexpr long stack_size = 64 * 1024;
constexpr long pool_size = 32 * 1024;  // threadgroup memory, Metal's limit
constexpr int most_lanes = 1024, most_memories = 32;

Lane lanes[most_lanes];
int lane_count;
Lane* current;
void* scheduler;
char* stacks;
char pool[pool_size] __attribute__((aligned(16)));
Buffer pool_buffer;
Memory memories[most_memories];
int memory_count;
Report* report;
Entry entry;
void** arguments;
long argument_bytes;
int group_number;
int matrix_order;

void leave() { emulator_switch(&current->stack_pointer, scheduler); }

void fail(Fault fault, const Lane* lane, int line) {
  if (report->fault == no_fault) {
    report->fault = fault;
    report->line = line;
    report->lane = lane->position.thread_index_in_threadgroup;
    report->group = group_number - 1;
  }
}

void fail_access(Fault fault, char* address, long size, bool store) {
  if (report->fault == no_fault) {
    fail(fault, current, 0);
    report->address = address;
    report->size = size;
    report->is_store = store;
  }
  leave();  // and never come back
}

bool inside(const void* address, const void* start, long size) {
  return (const char*)address >= (const char*)start && (const char*)address < (const char*)start + size;
}

Fault check(Memory& memory, Cell& cell, bool store) {
  const short me = current - lanes;
  const bool same_group = cell.group == group_number;
  if (cell.epoch != memory.epoch || !same_group) {
    if (cell.group != 0 && !same_group && (store || cell.stored)) {
      return race;  // nothing orders threadgroups
    }
    cell.epoch = memory.epoch;
    cell.group = group_number;
    cell.writer = cell.reader = none;
  }
  if (cell.writer != none && cell.writer != me) {
    return race;
  }
  if (store) {
    if (cell.reader != none && cell.reader != me) {
      return race;
    }
    cell.writer = me;
    cell.stored = cell.has_value = true;
    return no_fault;
  }
  cell.reader = cell.reader == none || cell.reader == me ? me : several;
  return cell.has_value ? no_fault : read_before_write;
}

void touch(void* pointer, long size, bool store) {
  char* address = (char*)pointer;
  if (!current || inside(address, stacks, stack_size * most_lanes) || inside(address, lanes, sizeof lanes) ||
      inside(address, arguments, argument_bytes)) {
    return;
  }
  for (int i = 0; i < memory_count; i++) {
    Memory& memory = memories[i];
    Buffer* buffer = memory.buffer;
    if (!inside(address, buffer->start, buffer->size)) {
      continue;
    }
    if (address + size > buffer->start + buffer->size || (store && !memory.cells)) {
      return fail_access(out_of_range, address, size, store);
    }
    if ((address - buffer->start) % size) {
      return fail_access(misaligned, address, size, store);
    }
    (store ? buffer->written : buffer->read) += size;
    for (long byte = 0; memory.cells && byte < size; byte++) {
      const Fault fault = check(memory, memory.cells[address - buffer->start + byte], store);
      if (fault != no_fault) {
        return fail_access(fault, address, size, store);
      }
    }
    return;
  }
  fail_access(out_of_range, address, size, store);
}

void run_lane() {
  entry(arguments);
  current->state = ended;
  leave();
  __builtin_trap();
}

void prepare(Lane& lane, char* stack) {
  lane.state = ready;
  lane.allocated = 0;
  void** top = (void**)(((unsigned long)stack + stack_size) & ~63ul);
  *--top = nullptr;
  *--top = (void*)run_lane;
  for (int saved = 0; saved < 6; saved++) {
    *--top = nullptr;
  }
  lane.stack_pointer = top;
}

float chain(const float* a, const float* b, float c, int count, int step = 1) {
  for (int k = step > 0 ? 0 : count - 1; k >= 0 && k < count; k += step) {
    c = __builtin_fmaf(a[k], b[k], c);
  }
  return c;
}

// A row of a times a column of b, plus c.
float matrix_step(const float* a, const float* b, float c) {
  switch (matrix_order) {
    case ascending:
      return chain(a, b, c, 8);
    case descending:
      return chain(a, b, c, 8, -1);
    case halves:
      return c + chain(a, b, 0, 4) + chain(a + 4, b + 4, 0, 4);
    default: {
      float sums[4];
      for (int k = 0; k < 4; k++) {
        const float first = a[2 * k] * b[2 * k], second = a[2 * k + 1] * b[2 * k + 1];
        sums[k] = first + second;
      }
      return c + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
  }
}

void multiply(Lane* simdgroup) {
  float a[8][8], b[8][8];  // b by columns
  for (int i = 0; i < 32; i++) {
    const int row = simdgroup_float8x8::row(i), column = simdgroup_float8x8::column(i);
    for (int e = 0; e < 2; e++) {
      a[row][column + e] = simdgroup[i].a[e];
      b[column + e][row] = simdgroup[i].b[e];
    }
  }
  for (int i = 0; i < 32; i++) {
    const int row = simdgroup_float8x8::row(i), column = simdgroup_float8x8::column(i);
    for (int e = 0; e < 2; e++) {
      simdgroup[i].c[e] = matrix_step(a[row], b[column + e], simdgroup[i].c[e]);
    }
    simdgroup[i].state = ready;
  }
}

void exchange(Lane* simdgroup, int count) {
  if (simdgroup[0].operation == operation_multiply) {
    return multiply(simdgroup);
  }
  float values[32];
  for (int i = 0; i < 32; i++) {
    values[i] = i < count ? simdgroup[i].value : 0;
  }
  const int operation = simdgroup[0].operation;
  const bool is_sum = operation == operation_sum;
  for (int mask = is_sum ? 1 : simdgroup[0].argument; mask < 32; mask = is_sum ? mask * 2 : 32) {
    float next[32];
    for (int i = 0; i < 32; i++) {
      const int from = operation == operation_down ? i + mask : (i ^ mask) & 31;
      next[i] = is_sum ? values[i] + values[from] : from < 32 ? values[from] : __builtin_nanf("");
    }
    __builtin_memcpy(values, next, sizeof values);
  }
  for (int i = 0; i < count; i++) {
    simdgroup[i].value = values[i];
    simdgroup[i].state = ready;
  }
}

// Lets a simdgroup whose lanes all wait in the same operation go on.
bool release_simdgroup(Lane* simdgroup, int count) {
  int waiting = 0, stopped = 0;
  for (int i = 0; i < count; i++) {
    waiting += simdgroup[i].state == in_simdgroup;
    stopped += simdgroup[i].state != ready;
  }
  if (waiting == 0 || stopped < count) {
    return false;
  }
  for (int i = 0; i < count; i++) {
    const Lane &lane = simdgroup[i], &first = simdgroup[0];
    const bool part = count < 32 && lane.operation == operation_multiply;  // matrices need every lane
    if (part || lane.state != in_simdgroup || lane.operation != first.operation || lane.line != first.line ||
        lane.argument != first.argument) {
      const Lane& at = lane.state == in_simdgroup ? lane : first;
      fail(divergent_simdgroup, &lane, at.line);
      return false;
    }
  }
  exchange(simdgroup, count);
  return true;
}

// Lets the threadgroup go on when all lanes wait in the same barrier.
bool release_barrier() {
  for (int i = 0; i < lane_count; i++) {
    if (lanes[i].state != in_barrier || lanes[i].line != lanes[0].line) {
      const bool waits = lanes[i].state == in_barrier;
      fail(divergent_barrier, &lanes[i], waits ? lanes[i].line : lanes[0].line);
      return false;
    }
  }
  for (int i = 0; i < memory_count; i++) {
    const int flag = memories[i].buffer == &pool_buffer ? 2 : 1;
    memories[i].epoch += (lanes[0].argument & flag) != 0;
  }
  for (int i = 0; i < lane_count; i++) {
    lanes[i].state = ready;
  }
  return true;
}

void run_group() {
  while (report->fault == no_fault) {
    int finished = 0;
    for (int i = 0; i < lane_count; i++) {
      if (lanes[i].state == ready) {
        current = &lanes[i];
        emulator_switch(&scheduler, current->stack_pointer);
        if (report->fault != no_fault) {
          return;
        }
      }
      finished += lanes[i].state == ended;
    }
    if (finished == lane_count) {
      return;
    }
    bool released = false;
    for (int i = 0; i < lane_count && report->fault == no_fault; i += 32) {
      released |= release_simdgroup(&lanes[i], lane_count - i < 32 ? lane_count - i : 32);
    }
    if (!released && report->fault == no_fault) {
      release_barrier();
    }
  }
}

void add_memory(Buffer* buffer, bool writable) {
  Memory& memory = memories[memory_count++];
  memory.buffer = buffer;
  memory.epoch = 1;
  memory.cells = nullptr;
  if (writable) {
    memory.cells = (Cell*)malloc(buffer->size * sizeof(Cell));
    memset(memory.cells, 0, buffer->size * sizeof(Cell));
    for (long byte = 0; byte < buffer->size; byte++) {
      memory.cells[byte].has_value = buffer->initialised;
    }
  }
}

void start_group(uint3 at, uint3 groups, uint3 grid, uint3 size) {
  uint3 here;  // a threadgroup at the edge of the grid is smaller
  for (int axis = 0; axis < 3; axis++) {
    here[axis] = min(size[axis], grid[axis] - at[axis] * size[axis]);
  }
  lane_count = here[0] * here[1] * here[2];
  if (lanes[0].allocated) {  // by the group before
    memset(pool, 0xA5, pool_size);
    memset(memories[0].cells, 0, pool_size * sizeof(Cell));
  }
  group_number++;
  for (int i = 0; i < lane_count; i++) {
    const uint3 local = {i % here[0], i / here[0] % here[1], i / (here[0] * here[1])};
    const uint index = i;
    lanes[i].position =
        Position{at * size + local, local, at, groups, grid, here, index / 32, index % 32, index, 32};
    prepare(lanes[i], stacks + i * stack_size);
  }
}

}  // namespace

extern "C" {

const Position* emulator_position() { return &current->position; }

float emulator_exchange(float value, int operation, int argument, int line) {
  current->value = value;
  current->operation = operation;
  current->argument = argument;
  current->line = line;
  current->state = in_simdgroup;
  leave();
  return current->value;
}

void emulator_barrier(int flags, int line) {
  current->argument = flags;
  current->line = line;
  current->state = in_barrier;
  leave();
}

threadgroup void* emulator_threadgroup_memory(long bytes) {
  const long start = current->allocated;
  current->allocated += (bytes + 15) / 16 * 16;
  if (current->allocated > pool_size) {
    fail_access(out_of_threadgroup_memory, pool, bytes, false);
  }
  return (threadgroup void*)(pool + start);
}

// bfloat from float: to nearest, ties to even; clang calls it where the processor has no instruction.
__bf16 __truncsfbf2(float value) {
  unsigned bits;
  __builtin_memcpy(&bits, &value, 4);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const unsigned short upper = nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  __bf16 result;
  __builtin_memcpy(&result, &upper, 2);
  return result;
}

}  // extern "C"

#define MULTIPLY(T)                                                                                       \
  metal::vec<float, 2> emulator_multiply(metal::vec<T, 2> a, metal::vec<T, 2> b, metal::vec<float, 2> c, \
                                         int line) {                                                      \
    current->a = metal::vec<float, 2>{float(a[0]), float(a[1])};                                          \
    current->b = metal::vec<float, 2>{float(b[0]), float(b[1])};                                          \
    current->c = c;                                                                                       \
    emulator_exchange(0, operation_multiply, 0, line);                                                    \
    return current->c;                                                                                    \
  }
MULTIPLY(float)
MULTIPLY(half)
MULTIPLY(bfloat)

extern "C" {

#define TRACE(size)                                                                   \
  void __sanitizer_cov_load##size(void* address) { touch(address, size, false); }     \
  void __sanitizer_cov_store##size(void* address) { touch(address, size, true); }
TRACE(1)
TRACE(2)
TRACE(4)
TRACE(8)
TRACE(16)

// Runs `run` for every thread of the grid, which is counted in threads, with a MatrixOrder. Faults end in
// `result`.
void emulator_dispatch(Entry run, void** values, long value_count, Buffer* buffers, int buffer_count,
                       const uint* grid_size, const uint* group_size, int order, Report* result) {
  const unsigned mode = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(mode | 0x8040);  // flush denormals, in and out
  entry = run;
  arguments = values;
  argument_bytes = value_count * sizeof(void*);
  report = result;
  matrix_order = order;
  group_number = 0;
  memory_count = 0;
  stacks = (char*)malloc(stack_size * most_lanes);
  pool_buffer = Buffer{pool, pool_size, 1, 0, 0, 0};
  lanes[0].allocated = pool_size;  // what a run before left there goes
  add_memory(&pool_buffer, true);
  for (int i = 0; i < buffer_count; i++) {
    add_memory(&buffers[i], buffers[i].is_output);
  }
  const uint3 grid = {grid_size[0], grid_size[1], grid_size[2]};
  uint3 size = {group_size[0], group_size[1], group_size[2]}, groups;
  for (int axis = 0; axis < 3; axis++) {
    size[axis] = min(size[axis], grid[axis]);
    groups[axis] = (grid[axis] + size[axis] - 1) / size[axis];
  }
  for (uint i = 0; i < groups[0] * groups[1] * groups[2] && report->fault == no_fault; i++) {
    const uint3 at = {i % groups[0], i / groups[0] % groups[1], i / (groups[0] * groups[1])};
    start_group(at, groups, grid, size);
    run_group();
  }
  current = nullptr;
  for (int i = 0; i < memory_count; i++) {
    free(memories[i].cells);
  }
  free(stacks);
  __builtin_ia32_ldmxcsr(mode);
}

}  // extern "C"
