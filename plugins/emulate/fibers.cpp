// Threads of a block as fibers of one host thread, blocks one after another.
//
// Knows barriers and the sanitizers' fiber interfaces, not the kernels. Under ThreadSanitizer a fiber counts as a thread of its own, and
// only the barriers order two of them: a missing one is a race whatever the order they ran in. Blocks are ordered by nothing at all.
// Shared memory is a fresh allocation of exactly the launched size for each block, filled with NaN.
#include "cuda.h"

#include <stdlib.h>
#include <ucontext.h>

#include <vector>

#ifdef EMULATE_THREAD_SANITIZER
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#endif
#ifdef EMULATE_ADDRESS_SANITIZER
extern "C" {
void __sanitizer_start_switch_fiber(void**, const void*, size_t);
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
}
#endif

namespace {

constexpr size_t STACK_BYTES = 64 * 1024;
constexpr unsigned WARP = 32;

// Counts the arrived; `round` tells a fiber that its barrier opened. Two order points take turns: a fast fiber's next arrival must not
// count as something that a slow one saw.
struct Barrier {
    unsigned members = 0;
    unsigned arrived = 0;
    unsigned round = 0;
    char order[2] = {};
};

struct Fiber {
    ucontext_t context;
    void* stack = nullptr;
    emulate::Index index{};
    unsigned number = 0;
    bool done = false;
    void* sanitizer = nullptr;
};

struct Machine {
    emulate::Index grid{}, block{}, block_index{};
    void (*kernel)(void*) = nullptr;
    void* argument = nullptr;
    void* shared = nullptr;
    std::vector<Fiber> fibers;
    std::vector<Barrier> warps;
    std::vector<unsigned> exchanged;
    Barrier all;
    Fiber scheduler;
    Fiber* current = nullptr;
    const void* scheduler_stack = nullptr;
    size_t scheduler_stack_bytes = 0;
    bool progress = false;
    char started = 0, finished = 0;
    std::vector<void*> allocations;
} machine;

void acquire([[maybe_unused]] char& order) {
#ifdef EMULATE_THREAD_SANITIZER
    __tsan_acquire(&order);
#endif
}

void release([[maybe_unused]] char& order) {
#ifdef EMULATE_THREAD_SANITIZER
    __tsan_release(&order);
#endif
}

void switch_fiber(Fiber& from, Fiber& to) {
#ifdef EMULATE_THREAD_SANITIZER
    __tsan_switch_to_fiber(to.sanitizer, 1);  // 1: the switch itself orders nothing
#endif
#ifdef EMULATE_ADDRESS_SANITIZER
    const bool leaves = &to != &machine.scheduler;
    __sanitizer_start_switch_fiber(from.done ? nullptr : &from.sanitizer, leaves ? to.stack : machine.scheduler_stack,
                                   leaves ? STACK_BYTES : machine.scheduler_stack_bytes);
#endif
    swapcontext(&from.context, &to.context);
#ifdef EMULATE_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(from.sanitizer, nullptr, nullptr);
#endif
}

// Memory of one block. Kept to the end of the launch: used again, it would hold traces of accesses that nothing orders.
void* fresh(size_t bytes) {
    machine.allocations.push_back(malloc(bytes));
    return machine.allocations.back();
}

void open_if_complete(Barrier& barrier) {
    if (barrier.arrived == 0 || barrier.arrived < barrier.members) return;
    barrier.arrived = 0;
    ++barrier.round;
}

// `orders`: what was written before is seen after. Shuffles meet without it, as on the device.
void wait(Barrier& barrier, bool orders) {
    const unsigned round = barrier.round;
    if (orders) release(barrier.order[round % 2]);
    ++barrier.arrived;
    machine.progress = true;
    open_if_complete(barrier);
    while (barrier.round == round) switch_fiber(*machine.current, machine.scheduler);
    machine.progress = true;
    if (orders) acquire(barrier.order[round % 2]);
}

Barrier& warp() { return machine.warps[machine.current->number / WARP]; }

void leave(Barrier& barrier) {
    --barrier.members;
    open_if_complete(barrier);
}

void run_fiber() {
#ifdef EMULATE_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(nullptr, &machine.scheduler_stack, &machine.scheduler_stack_bytes);
#endif
    acquire(machine.started);
    machine.kernel(machine.argument);
    release(machine.finished);
    machine.current->done = true;
    machine.progress = true;
    leave(warp());
    leave(machine.all);
    switch_fiber(*machine.current, machine.scheduler);
}

void start(Fiber& fiber, unsigned number) {
    const emulate::Index& size = machine.block;
    fiber.index = {number % size.x, number / size.x % size.y, number / (size.x * size.y)};
    fiber.number = number;
    fiber.done = false;
    fiber.sanitizer = nullptr;
    fiber.stack = fresh(STACK_BYTES);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.context, run_fiber, 0);
#ifdef EMULATE_THREAD_SANITIZER
    fiber.sanitizer = __tsan_create_fiber(0);
#endif
}

// Runs the fibers in turn until all are done, or none gets any further.
bool run_block() {
    for (size_t left = machine.fibers.size(); left != 0;) {
        machine.progress = false;
        for (Fiber& fiber : machine.fibers) {
            if (fiber.done) continue;
            machine.current = &fiber;
            switch_fiber(machine.scheduler, fiber);
            if (fiber.done) --left;
        }
        if (!machine.progress) return false;
    }
    return true;
}

}  // namespace

namespace emulate {

const Index& thread_index() { return machine.current->index; }
const Index& block_index() { return machine.block_index; }
const Index& block_size() { return machine.block; }
const Index& grid_size() { return machine.grid; }
void* shared_memory() { return machine.shared; }
void wait_for_block() { wait(machine.all, true); }
void wait_for_warp() { wait(warp(), true); }

unsigned exchange(unsigned value, unsigned lane_mask) {
    const unsigned number = machine.current->number;
    machine.exchanged[number] = value;
    wait(warp(), false);
    const unsigned received = machine.exchanged[number ^ lane_mask];
    wait(warp(), false);
    return received;
}

bool run(Index grid, Index block, size_t shared_bytes, void (*kernel)(void*), void* argument) {
    const unsigned threads = block.x * block.y * block.z;
    machine.grid = grid;
    machine.block = block;
    machine.kernel = kernel;
    machine.argument = argument;
    machine.fibers.resize(threads);
    machine.exchanged.assign((threads + WARP - 1) / WARP * WARP, 0);
#ifdef EMULATE_THREAD_SANITIZER
    machine.scheduler.sanitizer = __tsan_get_current_fiber();
#endif
    release(machine.started);
    bool complete = true;
    for (unsigned number = 0; complete && number < grid.x * grid.y * grid.z; ++number) {
        machine.block_index = {number % grid.x, number / grid.x % grid.y, number / (grid.x * grid.y)};
        machine.shared = fresh(shared_bytes);
        memset(machine.shared, 0xff, shared_bytes);
        machine.all = Barrier{};
        machine.all.members = threads;
        machine.warps.assign((threads + WARP - 1) / WARP, Barrier{});
        for (unsigned i = 0; i < threads; ++i) {
            start(machine.fibers[i], i);
            ++machine.warps[i / WARP].members;
        }
        complete = run_block();
#ifdef EMULATE_THREAD_SANITIZER
        for (Fiber& fiber : machine.fibers) __tsan_destroy_fiber(fiber.sanitizer);
#endif
    }
    acquire(machine.finished);  // not before: what the host has seen of a block, the next one would have seen too
    for (void* allocation : machine.allocations) free(allocation);
    machine.allocations.clear();
    return complete;
}

}  // namespace emulate
