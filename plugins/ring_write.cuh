// Kernel of dspark::RingWrite (plugins/contract.py), in place: row i goes to slot (start + i) mod R, nothing else is touched.
//
// Rows are copied as bits, 16 bytes a thread, so one kernel serves every dtype. N <= R, so no two rows share a slot.
//
// B requests   G key/value heads   N rows   R ring capacity   V 16-byte vectors in a row
// updated [B,G,R,V]   rows [B,G,N,V]   start [B]   grid: N*V threads along x, B*G along y
#pragma once

namespace dspark {

__global__ void ring_write(uint4* updated, const uint4* __restrict__ rows, const long long* __restrict__ start, int heads, int capacity,
                           int count, int vectors) {
    const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (index >= count * vectors) return;
    const int row = index / vectors;
    int slot = static_cast<int>(start[blockIdx.y / heads] % capacity) + row;
    if (slot >= capacity) slot -= capacity;
    const long long head = blockIdx.y;
    updated[(head * capacity + slot) * vectors + index % vectors] = rows[head * count * vectors + index];
}

}  // namespace dspark
