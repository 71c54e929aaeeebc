// libnccl: exchanges between the processes of this machine, over shared memory. They are done when the call returns.
#include "null_card.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <fcntl.h>
#include <nccl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

namespace {

constexpr size_t SLOT = 4 << 20;  // bytes of each process; longer messages take several rounds
constexpr int PATIENCE = 600;     // seconds that a process waits for the others, as a job's default timeout

struct Shared {
    std::atomic<int> arrived, round;
    char gap[120];
    char slots[];  // of each process
};

}  // namespace

struct ncclComm {
    std::string name;
    Shared* shared;
    int rank, size, splits;

    char* slot(int process) { return shared->slots + SLOT * process; }
    char* mine() { return slot(rank); }

    void wait_for_all() {
        int now = shared->round;
        if (shared->arrived.fetch_add(1) + 1 == size) {
            shared->arrived = 0;
            shared->round = now + 1;
            return;
        }
        for (long tries = 0; shared->round == now; tries++) {
            if (tries < 1000) sched_yield();
            else usleep(100);
            if (tries > PATIENCE * 10000L) {
                fprintf(stderr, "null card: process %d of %d waited %d s for the others\n", rank, size, PATIENCE);
                abort();
            }
        }
    }
};

namespace {

ncclResult_t join(const std::string& name, int size, int rank, ncclComm_t* joined) {
    int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    size_t bytes = sizeof(Shared) + SLOT * size;
    if (file < 0 || ftruncate(file, bytes)) return ncclSystemError;
    void* begin = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (begin == MAP_FAILED) return ncclSystemError;
    *joined = new ncclComm{name, static_cast<Shared*>(begin), rank, size, 0};
    (*joined)->wait_for_all();
    if (rank == 0) shm_unlink(name.c_str());
    return ncclSuccess;
}

size_t bytes_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
        default: return 8;
    }
}

float from_bf16(uint16_t half) {
    uint32_t bits = uint32_t(half) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to the nearest, ties to even
}

// Reduce `count` elements of all slots into `out`; `Sum` is what is added up in.
template <class Element, class Sum, class Read, class Write>
void reduce_as(ncclComm* comm, void* out, size_t count, ncclRedOp_t op, Read read, Write write) {
    for (size_t i = 0; i < count; i++) {
        Sum total = read(reinterpret_cast<Element*>(comm->slot(0))[i]);
        for (int process = 1; process < comm->size; process++) {
            Sum value = read(reinterpret_cast<Element*>(comm->slot(process))[i]);
            switch (op) {
                case ncclProd: total *= value; break;
                case ncclMax: total = std::max(total, value); break;
                case ncclMin: total = std::min(total, value); break;
                default: total += value;
            }
        }
        if (op == ncclAvg) total /= Sum(comm->size);
        static_cast<Element*>(out)[i] = write(total);
    }
}
template <class Element> void reduce_plain(ncclComm* comm, void* out, size_t count, ncclRedOp_t op) {
    auto same = [](Element value) { return value; };
    reduce_as<Element, Element>(comm, out, count, op, same, same);
}
bool reduce(ncclComm* comm, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op) {
    switch (type) {
        case ncclInt8: reduce_plain<int8_t>(comm, out, count, op); return true;
        case ncclUint8: reduce_plain<uint8_t>(comm, out, count, op); return true;
        case ncclInt32: reduce_plain<int32_t>(comm, out, count, op); return true;
        case ncclInt64: reduce_plain<int64_t>(comm, out, count, op); return true;
        case ncclFloat32: reduce_plain<float>(comm, out, count, op); return true;
        case ncclFloat64: reduce_plain<double>(comm, out, count, op); return true;
        case ncclBfloat16: reduce_as<uint16_t, float>(comm, out, count, op, from_bf16, to_bf16); return true;
        case ncclFloat16:
            reduce_as<_Float16, float>(comm, out, count, op, [](_Float16 value) { return float(value); },
                                       [](float value) { return _Float16(value); });
            return true;
        default: return false;
    }
}

char* at(void* begin, size_t offset) { return static_cast<char*>(begin) + offset; }
const char* at(const void* begin, size_t offset) { return static_cast<const char*>(begin) + offset; }

// Split a message into rounds that fit a slot: `turn(offset, bytes)` runs between two waits for all.
template <class Turn> void in_rounds(ncclComm* comm, size_t bytes, const void* mine, Turn turn) {
    for (size_t offset = 0; offset < bytes; offset += SLOT) {
        size_t size = std::min(SLOT, bytes - offset);
        if (mine) memcpy(comm->mine(), at(mine, offset), size);
        comm->wait_for_all();
        turn(offset, size);
        comm->wait_for_all();
    }
}

ncclResult_t reduced(ncclComm* comm, const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op) {
    bool known = true;
    in_rounds(comm, count * bytes_of(type), from, [&](size_t offset, size_t size) {
        if (to) known = reduce(comm, at(to, offset), size / bytes_of(type), type, op);
    });
    return known ? ncclSuccess : ncclInvalidArgument;
}

}  // namespace

#define DONE(declaration) \
    ncclResult_t declaration { return ncclSuccess; }

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "an error of the null card's NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    memset(id, 0, sizeof *id);
    return getrandom(id, sizeof(uint64_t), 0) == sizeof(uint64_t) ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
    uint64_t number;
    memcpy(&number, &id, sizeof number);
    return join("/null-card-" + std::to_string(number), size, rank, comm);
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}
// Those who name one color become a communicator of their own, in the order of their keys.
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t*) {
    int wish[] = {color, key}, rank = 0, size = 0;
    in_rounds(comm, sizeof wish, wish, [&](size_t, size_t) {
        for (int process = 0; process < comm->size; process++) {
            int other[2];
            memcpy(other, comm->slot(process), sizeof other);
            size += other[0] == color;
            rank += other[0] == color && (other[1] < key || (other[1] == key && process < comm->rank));
        }
    });
    *made = nullptr;
    std::string name = comm->name + "-" + std::to_string(comm->splits++) + "-" + std::to_string(color);
    return color == NCCL_SPLIT_NOCOLOR ? ncclSuccess : join(name, size, rank, made);
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
    *count = comm->size;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    *rank = comm->rank;
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
    *error = ncclSuccess;
    return ncclSuccess;
}
DONE(ncclCommFinalize(ncclComm_t))
DONE(ncclCommDestroy(ncclComm_t))
DONE(ncclCommAbort(ncclComm_t))
DONE(ncclCommRegister(const ncclComm_t, void*, size_t, void**))
DONE(ncclCommDeregister(const ncclComm_t, void*))
DONE(ncclGroupStart())
DONE(ncclGroupEnd())

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t) {
    record("nccl all-reduce %zu", count * bytes_of(type));
    return reduced(comm, from, to, count, type, op);
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t) {
    record("nccl reduce %zu", count * bytes_of(type));
    return reduced(comm, from, comm->rank == root ? to : nullptr, count, type, op);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t) {
    size_t bytes = count * bytes_of(type);
    record("nccl reduce-scatter %zu", bytes * comm->size);
    ncclResult_t result = ncclSuccess;
    for (int owner = 0; owner < comm->size && result == ncclSuccess; owner++)
        result = reduced(comm, at(from, owner * bytes), comm->rank == owner ? to : nullptr, count, type, op);
    return result;
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t) {
    size_t bytes = count * bytes_of(type);
    record("nccl broadcast %zu", bytes);
    in_rounds(comm, bytes, comm->rank == root ? from : nullptr,
              [&](size_t offset, size_t size) { memcpy(at(to, offset), comm->slot(root), size); });
    return ncclSuccess;
}
ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(data, data, count, type, root, comm, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t) {
    size_t bytes = count * bytes_of(type);
    record("nccl all-gather %zu", bytes * comm->size);
    in_rounds(comm, bytes, from, [&](size_t offset, size_t size) {
        for (int process = 0; process < comm->size; process++)
            memcpy(at(to, process * bytes + offset), comm->slot(process), size);
    });
    return ncclSuccess;
}
}
