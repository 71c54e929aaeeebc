// A card that holds memory, copies it, and runs no kernel: what the files of this library share.
//
// Preloaded under a CUDA build of PyTorch, the library answers in place of libcudart, libcuda, libcublas, libcublasLt,
// libnccl and libnvidia-ml. Memory of the card is memory of this process that becomes real when it is written to.
#pragma once

#include <cstddef>
#include <cstdint>

struct Card {
    int major, minor;  // compute capability
    size_t memory;     // bytes
    int processors;    // multiprocessors
    int threads;       // of a multiprocessor
    size_t shared_processor, shared_block;  // bytes of shared memory: of a multiprocessor; of a block at most
    size_t l2;         // bytes
    char name[96];     // the driver's
};

// What a driver and its libraries take of a card before the first tensor. Nobody has measured it for us.
constexpr size_t CONTEXT = size_t(512) << 20;
constexpr int CUDA_VERSION_ANSWERED = 13000;
constexpr int MOST_CARDS = 16;

const Card& card();  // from NULL_CARD, as run.py writes it; all cards are of one kind
int card_count();    // from NULL_CARD_COUNT
int current_card();
void set_current_card(int number);

// One line of the trace, a file a process: NULL_CARD_TRACE=prefix writes prefix.PID.
void record(const char* format, ...) __attribute__((format(printf, 1, 2)));
bool recording();

// A driver's handles are opaque: each is another number.
template <class Handle> Handle new_handle();
uintptr_t next_handle();
template <class Handle> Handle new_handle() { return reinterpret_cast<Handle>(next_handle()); }

// Memory. `kind` is what a copy from or to an address is called in the trace.
enum class Kind { pageable, pinned, device };
struct Range {
    size_t size;
    Kind kind;
    int number;  // of the card
};
void* address_space(size_t size);  // zeros, which take no memory before they are written to; null when there is none
void release_address_space(void* begin, size_t size);
bool take(size_t size);  // of the current card's memory; false where it has no room
void give_back(size_t size, int number);
size_t used(int number);
void add_range(void* begin, Range range);
Range remove_range(void* begin);  // size 0 where none begins there
Range find_range(const void* address);  // Kind::pageable where it lies in none
void copy(void* to, const void* from, size_t size, const char* how);

// Kernels by the address or handle that launches them.
void name_kernel(const void* kernel, const char* name);
bool launch(const void* kernel);  // false where PyTorch has no code for this card

int attribute(int which);  // of the card; the driver's numbers, which are the runtime's too
