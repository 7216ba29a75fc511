/* Virtual memory management, pinned host memory, and plain allocations. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstdlib>

#include "standin.h"

namespace standin {
namespace {

struct Handle {
  int fd;
  size_t bytes;
  CUmemAllocationProp properties;
  int mappings = 0;
};
/* Never destroyed: threads of kernels may outlive main. */
auto& handles = *new std::map<CUmemGenericAllocationHandle, Handle>;
CUmemGenericAllocationHandle next_handle = 0x1000;

struct Mapping {
  size_t bytes;
  CUmemGenericAllocationHandle handle;
  int device;        /* where the memory lies */
  uint32_t access;   /* a bit for each device */
};
auto& mappings = *new std::map<uint64_t, Mapping>;
auto& reservations = *new std::map<uint64_t, size_t>;

struct HostRange {
  size_t bytes;
  unsigned flags;
};
auto& host_ranges = *new std::map<uint64_t, HostRange>;

struct Allocation {
  size_t bytes;
  int device;
};
auto& allocations = *new std::map<uint64_t, Allocation>;

/* The entry of a map of ranges that holds an address. */
template <typename Map>
typename Map::iterator holding(Map& ranges, uint64_t address, size_t (*bytes_of)(const typename Map::mapped_type&)) {
  auto next = ranges.upper_bound(address);
  if (next == ranges.begin()) return ranges.end();
  auto found = std::prev(next);
  return address - found->first < bytes_of(found->second) ? found : ranges.end();
}

size_t plain(const size_t& bytes) { return bytes; }
template <typename T>
size_t bytes_of(const T& t) {
  return t.bytes;
}

bool aligned(uint64_t n, uint64_t to = kGranularity) { return n % to == 0; }

bool overlaps_mapping(uint64_t at, size_t bytes) {
  auto next = mappings.lower_bound(at + bytes);
  return next != mappings.begin() && std::prev(next)->first + std::prev(next)->second.bytes > at;
}

/* Whether the range is exactly some whole mappings, side by side. */
bool whole_mappings(uint64_t at, size_t bytes) {
  uint64_t end = at + bytes;
  while (at < end) {
    auto found = mappings.find(at);
    if (found == mappings.end()) return false;
    at += found->second.bytes;
  }
  return at == end && bytes > 0;
}

int reserve_none(uint64_t at, size_t bytes) {
  void* got = mmap((void*)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return got == MAP_FAILED ? -1 : 0;
}

}  // namespace

bool accessible(int device, uint64_t address, uint64_t bytes) {
  if (address + bytes < address) return false;
  for (uint64_t at = address, end = address + bytes; at < end || at == address;) {
    auto mapping = holding(mappings, at, bytes_of<Mapping>);
    auto host = holding(host_ranges, at, bytes_of<HostRange>);
    auto allocation = holding(allocations, at, bytes_of<Allocation>);
    if (mapping != mappings.end()) {
      bool may = (mapping->second.access >> device & 1) != 0;
      if (!may && on("access-before-use")) return false;
      at = mapping->first + mapping->second.bytes;
    } else if (host != host_ranges.end()) {
      if ((host->second.flags & CU_MEMHOSTREGISTER_DEVICEMAP) == 0) return false;
      at = host->first + host->second.bytes;
    } else if (allocation != allocations.end() && allocation->second.device == device) {
      at = allocation->first + allocation->second.bytes;
    } else {
      return false;
    }
  }
  return true;
}

bool pinned(const void* host_ptr, size_t bytes) {
  auto found = holding(host_ranges, (uint64_t)host_ptr, bytes_of<HostRange>);
  return found != host_ranges.end() && (uint64_t)host_ptr + bytes <= found->first + found->second.bytes;
}

}  // namespace standin

using namespace standin;

extern "C" {

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* prop, CUmemAllocationGranularity_flags) {
  if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* prop, unsigned long long flags) {
  ENTER(context);
  ESCAPES_CAPTURE("cuMemCreate");
  if (breaks(!aligned(bytes) || bytes == 0, "create-granularity", "a size that is no multiple of the granularity"))
    return CUDA_ERROR_INVALID_VALUE;
  bool bad = flags != 0 || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE;
  if (bad) return CUDA_ERROR_INVALID_VALUE;
  if (breaks(prop->location.id >= gpus(), "ordinal", "memory on a device that does not exist")) return CUDA_ERROR_INVALID_DEVICE;
  char name[64];
  snprintf(name, sizeof name, "fuselink-standin-gpu%d", prop->location.id);
  int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = next_handle++;
  handles[*handle] = Handle{fd, bytes, *prop};
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  ENTER(context);
  auto found = handles.find(handle);
  if (breaks(found == handles.end(), "released-handle", "a handle that is not there is released")) return CUDA_ERROR_INVALID_VALUE;
  if (found == handles.end()) return CUDA_SUCCESS;
  /* The driver would keep the memory until the last unmap; the library's guards never leave it that way. */
  if (breaks(found->second.mappings > 0, "unmap-before-release", "a handle is released while it is mapped"))
    return CUDA_ERROR_INVALID_VALUE;
  close(found->second.fd);
  handles.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr, unsigned long long flags) {
  ENTER(context);
  if (breaks(!aligned(bytes) || bytes == 0, "reserve-granularity", "addresses that are no multiple of the granularity"))
    return CUDA_ERROR_INVALID_VALUE;
  if (flags != 0 || (alignment & (alignment - 1)) != 0) return CUDA_ERROR_INVALID_VALUE;
  /* One granule more, so that the start can be aligned as on a GPU. */
  void* got = mmap(nullptr, bytes + kGranularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  uint64_t start = ((uint64_t)got + kGranularity - 1) / kGranularity * kGranularity;
  if (start > (uint64_t)got) munmap(got, start - (uint64_t)got);
  uint64_t end = (uint64_t)got + bytes + kGranularity;
  if (end > start + bytes) munmap((void*)(start + bytes), end - start - bytes);
  reservations[start] = bytes;
  *address = start;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  ENTER(context);
  auto found = reservations.find(address);
  bool whole = found != reservations.end() && found->second == bytes;
  if (breaks(!whole, "free-whole", "addresses are freed that were not reserved so")) return CUDA_ERROR_INVALID_VALUE;
  if (breaks(overlaps_mapping(address, bytes), "unmap-before-free", "addresses are freed while something is mapped there"))
    return CUDA_ERROR_INVALID_VALUE;
  if (whole) {
    munmap((void*)address, bytes);
    reservations.erase(found);
  }
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  ENTER(context);
  ESCAPES_CAPTURE("cuMemMap");
  auto found = handles.find(handle);
  if (breaks(found == handles.end(), "released-handle", "a handle that is not there is mapped")) return CUDA_ERROR_INVALID_VALUE;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (breaks(!aligned(address) || !aligned(bytes), "map-granularity", "a mapping that is not aligned to the granularity"))
    return CUDA_ERROR_INVALID_VALUE;
  bool whole = found == handles.end() || (offset == 0 && bytes == found->second.bytes);
  if (breaks(!whole, "map-whole", "a mapping that is not the whole handle")) return CUDA_ERROR_INVALID_VALUE;
  auto in = holding(reservations, address, plain);
  bool reserved = in != reservations.end() && address + bytes <= in->first + in->second;
  if (breaks(!reserved, "map-reserved", "a mapping at addresses that are not reserved")) return CUDA_ERROR_INVALID_VALUE;
  if (breaks(overlaps_mapping(address, bytes), "map-free", "a mapping over another one")) return CUDA_ERROR_INVALID_VALUE;
  if (found == handles.end() || !reserved) return CUDA_SUCCESS; /* only without the rules above */
  /* Not to be touched before there is access. */
  int prot = on("access-before-use") ? PROT_NONE : PROT_READ | PROT_WRITE;
  void* got = mmap((void*)address, bytes, prot, MAP_SHARED | MAP_FIXED, found->second.fd, 0);
  if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  found->second.mappings += 1;
  mappings[address] = Mapping{bytes, handle, found->second.properties.location.id, 0};
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  ENTER(context);
  MAY_WAIT(context->device, "cuMemUnmap");
  if (breaks(!whole_mappings(address, bytes), "unmap-whole", "a part of a mapping, or nothing, is unmapped"))
    return CUDA_ERROR_INVALID_VALUE;
  for (uint64_t at = address; at < address + bytes;) {
    auto found = mappings.find(at);
    if (found == mappings.end()) break;
    auto handle = handles.find(found->second.handle);
    if (handle != handles.end()) handle->second.mappings -= 1;
    at += found->second.bytes;
    mappings.erase(found);
  }
  return reserve_none(address, bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  ENTER(context);
  MAY_WAIT(context->device, "cuMemSetAccess");
  if (breaks(!whole_mappings(address, bytes), "access-mapped", "access to what is not mapped, or to a part")) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    int device = access[i].location.id;
    if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || device >= gpus()) return CUDA_ERROR_INVALID_DEVICE;
    for (uint64_t at = address; at < address + bytes;) {
      auto found = mappings.find(at);
      if (found == mappings.end()) break;
      bool reach = found->second.device == device || setting("FL_STANDIN_PEERS", 1) != 0;
      if (breaks(!reach, "peer-access", "access to a GPU's memory for another that cannot reach it")) return CUDA_ERROR_INVALID_DEVICE;
      bool give = access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      found->second.access = give ? found->second.access | 1u << device : found->second.access & ~(1u << device);
      mprotect((void*)found->first, found->second.bytes, found->second.access != 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
      at += found->second.bytes;
    }
  }
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long) {
  ENTER(context);
  auto found = handles.find(handle);
  if (breaks(found == handles.end(), "released-handle", "a handle that is not there is exported")) return CUDA_ERROR_INVALID_VALUE;
  if (found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
  bool asked = (found->second.properties.requestedHandleTypes & type) != 0;
  if (breaks(!asked, "handle-type", "memory is exported as it was not created to be")) return CUDA_ERROR_INVALID_VALUE;
  *(int*)out = fcntl(found->second.fd, F_DUPFD_CLOEXEC, 0);
  return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* os_handle, CUmemAllocationHandleType type) {
  ENTER(context);
  char path[64], name[PATH_MAX];
  snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(intptr_t)os_handle);
  ssize_t length = readlink(path, name, sizeof name - 1);
  name[length < 0 ? 0 : length] = 0;
  int device = -1;
  bool ours = sscanf(name, "/memfd:fuselink-standin-gpu%d", &device) == 1 && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  if (breaks(!ours, "import-kind", "a descriptor is imported that is no memory of a GPU")) return CUDA_ERROR_INVALID_VALUE;
  int fd = fcntl((int)(intptr_t)os_handle, F_DUPFD_CLOEXEC, 0);
  struct stat size;
  if (fd < 0 || fstat(fd, &size) != 0) return CUDA_ERROR_INVALID_VALUE;
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  prop.requestedHandleTypes = type;
  prop.allocFlags.gpuDirectRDMACapable = 1;
  *handle = next_handle++;
  handles[*handle] = Handle{fd, (size_t)size.st_size, prop};
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop, CUmemGenericAllocationHandle handle) {
  ENTER(context);
  auto found = handles.find(handle);
  if (found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
  *prop = found->second.properties;
  return CUDA_SUCCESS;
}

CUresult cuMemGetHandleForAddressRange(void* out, CUdeviceptr address, size_t bytes, CUmemRangeHandleType type, unsigned long long) {
  ENTER(context);
  if (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD) return CUDA_ERROR_INVALID_VALUE;
  if (breaks(!aligned(address, kPage) || !aligned(bytes, kPage), "dma-buf-pages", "a dma-buf that is not made of whole pages"))
    return CUDA_ERROR_INVALID_VALUE;
  auto found = holding(mappings, address, bytes_of<Mapping>);
  bool mapped = found != mappings.end() && address + bytes <= found->first + found->second.bytes;
  if (breaks(!mapped, "dma-buf-mapped", "a dma-buf of addresses that are not all mapped")) return CUDA_ERROR_INVALID_VALUE;
  if (!mapped) return *(int*)out = memfd_create("fuselink-standin-nothing", MFD_CLOEXEC), CUDA_SUCCESS;
  auto& handle = handles.at(found->second.handle);
  bool capable = handle.properties.allocFlags.gpuDirectRDMACapable != 0;
  if (breaks(!capable, "rdma-capable", "a dma-buf of memory that was not created for NICs")) return CUDA_ERROR_NOT_SUPPORTED;
  *(int*)out = fcntl(handle.fd, F_DUPFD_CLOEXEC, 0);
  return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void* host_ptr, size_t bytes, unsigned int flags) {
  ENTER(context);
  MAY_WAIT(context->device, "cuMemHostRegister");
  if (breaks(pinned(host_ptr, 1), "register-once", "host memory is pinned twice")) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  host_ranges[(uint64_t)host_ptr] = HostRange{bytes, flags};
  return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void* host_ptr) {
  ENTER(context);
  MAY_WAIT(context->device, "cuMemHostUnregister");
  bool there = host_ranges.erase((uint64_t)host_ptr) == 1;
  if (breaks(!there, "unregister-registered", "host memory is unpinned that was not pinned")) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* dev_ptr, void* host_ptr, unsigned int) {
  ENTER(context);
  auto found = holding(host_ranges, (uint64_t)host_ptr, bytes_of<HostRange>);
  bool mapped = found != host_ranges.end() && (found->second.flags & CU_MEMHOSTREGISTER_DEVICEMAP) != 0;
  if (breaks(!mapped, "device-map", "a device address of host memory that is not mapped")) return CUDA_ERROR_INVALID_VALUE;
  *dev_ptr = (uint64_t)host_ptr;
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  ENTER(context);
  MAY_WAIT(context->device, "cuMemAlloc");
  void* got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (bytes == 0 || got == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  *address = (uint64_t)got;
  allocations[*address] = Allocation{bytes, context->device};
  return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  ENTER(context);
  MAY_WAIT(context->device, "cuMemFree");
  auto found = allocations.find(address);
  if (found == allocations.end()) return CUDA_ERROR_INVALID_VALUE;
  munmap((void*)address, found->second.bytes);
  allocations.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr address) {
  ENTER(context);
  auto found = holding(allocations, address, bytes_of<Allocation>);
  if (found == allocations.end()) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)out = found->second.device; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(uint64_t*)out = found->first; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t*)out = found->second.bytes; return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // extern "C"
