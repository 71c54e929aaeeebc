// The card itself: what it is, its memory, and the trace of what is asked of it.
#include "null_card.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

// Never destroyed: PyTorch still frees memory while a process ends.
std::mutex& lock = *new std::mutex;
auto& ranges = *new std::map<uintptr_t, Range>;
auto& kernels = *new std::unordered_map<const void*, std::string>;
std::atomic<size_t> used_bytes[MOST_CARDS];
std::atomic<uintptr_t> last_handle{0x1000};
thread_local int current = 0;

// CUDA 13 makes no code for cards before Turing, and so PyTorch's wheels for it have none.
constexpr int FIRST_MAJOR = 7, FIRST_MINOR = 5;

Card read_card() {
    const char* text = getenv("NULL_CARD");
    Card read{};
    if (!text || sscanf(text, "%d %d %zu %d %d %zu %zu %zu %95[^\n]", &read.major, &read.minor, &read.memory,
                        &read.processors, &read.threads, &read.shared_processor, &read.shared_block, &read.l2,
                        read.name) != 9) {
        fprintf(stderr, "null card: NULL_CARD does not describe a card; start with tests/card/null/run.py\n");
        abort();
    }
    return read;
}

}  // namespace

const Card& card() {
    static const Card read = read_card();
    return read;
}

int card_count() {
    static const int count = getenv("NULL_CARD_COUNT") ? atoi(getenv("NULL_CARD_COUNT")) : 1;
    return count;
}

int current_card() { return current; }
void set_current_card(int number) { current = number; }

uintptr_t next_handle() { return last_handle += 64; }

bool recording() {
    static const bool wanted = getenv("NULL_CARD_TRACE");
    return wanted;
}

void record(const char* format, ...) {
    if (!recording()) return;
    static std::mutex& writing = *new std::mutex;
    static int file = -1, owner = 0;
    char line[2048];
    va_list values;
    va_start(values, format);
    int length = vsnprintf(line, sizeof line - 1, format, values);
    va_end(values);
    if (length > int(sizeof line) - 2) length = sizeof line - 2;
    line[length] = '\n';
    std::lock_guard guard(writing);
    if (owner != getpid()) {  // a fork has a file of its own
        owner = getpid();
        std::string path = getenv("NULL_CARD_TRACE") + std::string(".") + std::to_string(owner);
        file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    }
    if (write(file, line, length + 1) != length + 1) abort();  // unbuffered: a killed process has told all
}

// Shared mappings, because run.py limits private memory: what runs away on the host shall not take the whole machine.
void* address_space(size_t size) {
    void* begin = mmap(nullptr, size ? size : 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return begin == MAP_FAILED ? nullptr : begin;
}

void release_address_space(void* begin, size_t size) { munmap(begin, size ? size : 1); }

bool take(size_t size) {
    std::lock_guard guard(lock);
    if (used_bytes[current] + size + CONTEXT > card().memory) return false;
    used_bytes[current] += size;
    return true;
}

void give_back(size_t size, int number) { used_bytes[number] -= size; }
size_t used(int number) { return used_bytes[number]; }

void add_range(void* begin, Range range) {
    std::lock_guard guard(lock);
    ranges[uintptr_t(begin)] = range;
}

Range remove_range(void* begin) {
    std::lock_guard guard(lock);
    auto found = ranges.find(uintptr_t(begin));
    if (found == ranges.end()) return Range{};
    Range range = found->second;
    ranges.erase(found);
    return range;
}

Range find_range(const void* address) {
    std::lock_guard guard(lock);
    auto after = ranges.upper_bound(uintptr_t(address));
    if (after != ranges.begin()) {
        auto& [begin, range] = *--after;
        if (uintptr_t(address) - begin < range.size) return range;
    }
    return Range{0, Kind::pageable, 0};
}

void copy(void* to, const void* from, size_t size, const char* how) {
    static const char* const names[] = {"pageable", "pinned", "device"};
    Kind target = find_range(to).kind, source = find_range(from).kind;
    record("copy %s %s %s %zu", how, names[int(source)], names[int(target)], size);
    // What lies on the card means nothing once a kernel should have run. A large copy within it would only make it real.
    if (source == Kind::device && target == Kind::device && size > (1 << 16)) return;
    memcpy(to, from, size);
}

void name_kernel(const void* kernel, const char* name) {
    std::lock_guard guard(lock);
    kernels[kernel] = name;
}

bool launch(const void* kernel) {
    const Card& here = card();
    if (here.major < FIRST_MAJOR || (here.major == FIRST_MAJOR && here.minor < FIRST_MINOR)) return false;
    if (recording()) {
        std::string name = "?";
        {
            std::lock_guard guard(lock);
            if (auto found = kernels.find(kernel); found != kernels.end()) name = found->second;
        }
        record("kernel %s", name.c_str());
    }
    return true;
}

int attribute(int which) {
    const Card& here = card();
    switch (which) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return here.major;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return here.minor;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return here.processors;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return here.threads;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return int(here.shared_processor);
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return int(here.shared_block);
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 << 10;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return int(here.l2);
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
        // A rate and a bus, which Triton and Inductor divide by; no speed follows from them here.
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 3200000;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
        // Multicast and fabric handles are for several cards' own links.
        case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: return 0;
        default: return 1;  // most of them ask whether the card can do something
    }
}
