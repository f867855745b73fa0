// Thread blocks of a cluster: their launch, ranks, barriers, and reads from each other's shared
// memory.

#pragma once

#include "hopper.cuh"

DEVICE float4 load_cluster(uint32_t at, uint32_t rank) {
  float4 v;
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;"
      " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(at), "r"(rank)
      : "memory");
  return v;
}

DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Of all threads of all blocks.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

template <class Kernel, class... Given>
int launch_clusters(Kernel kernel, dim3 grid, unsigned cluster, int threads, int shared,
                    void* stream, Given... given) {
  cudaError_t failed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (failed != cudaSuccess) return failed;
  cudaLaunchAttribute asked[2];
  asked[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  asked[0].val.programmaticStreamSerializationAllowed = 1;
  asked[1].id = cudaLaunchAttributeClusterDimension;
  asked[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream), config.attrs = asked, config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, given...);
}
