/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A kernel for Linux's I/O page-table code, as a plain C11 program for one thread.
 *
 * Written for this project against the names that the compiler found missing, with the simplest
 * bodies that do what each name promises to its caller. It is included before every file of
 * Linux; the headers that those files name are empty files, but the three that describe the
 * tables' own interface.
 *
 * Addresses: tables lie in one pool (shim.c). The "physical" address of a byte of the pool is its
 * place in the pool plus a base that is chosen for each table, so that tables can lie anywhere in
 * the address space of a format.
 */
#ifndef DMASPACE_SHIM_H
#define DMASPACE_SHIM_H

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Types. u64 is `long long` in the kernel on every machine. */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;
typedef u32 __le32;
typedef u64 __le64;
typedef u64 phys_addr_t;
typedef u64 dma_addr_t;
typedef unsigned int gfp_t;
typedef unsigned int slab_flags_t;

/*
 * Configuration: generic_pt checks itself, unless it is timed, and takes any feature of its
 * formats. Dirty tracking is there only for iommufd.
 */
#define IS_ENABLED(option) (option)
#define CONFIG_IOMMU_PT 1
#define CONFIG_SMP 1
#define CONFIG_PHYS_ADDR_T_64BIT 1
#define CONFIG_GENERIC_ATOMIC64 0
#define CONFIG_IOMMUFD_DRIVER 1
#define CONFIG_IOMMUFD_TEST 0
#ifndef CONFIG_DEBUG_GENERIC_PT
#define CONFIG_DEBUG_GENERIC_PT 1
#endif

/* Words of the compiler. */
#undef __always_inline
#define __always_inline inline __attribute__((always_inline))
#define __maybe_unused __attribute__((unused))
#define __init
#define __iomem
#define likely(condition) __builtin_expect(!!(condition), 1)
#define unlikely(condition) __builtin_expect(!!(condition), 0)
#define static_assert _Static_assert
#define BUILD_BUG() __builtin_trap()
#define CONCATENATE_NOW(a, b) a##b
#define CONCATENATE(a, b) CONCATENATE_NOW(a, b)
#define STRINGIFY_NOW(...) #__VA_ARGS__
#define __stringify(...) STRINGIFY_NOW(__VA_ARGS__)
#define container_of(member_pointer, type, member) \
	((type *)((char *)(member_pointer) - offsetof(type, member)))
#define container_of_const container_of
#define ARRAY_SIZE(array) (sizeof(array) / sizeof *(array))

/* Words of a module. */
#define EXPORT_SYMBOL_GPL(name)
#define EXPORT_SYMBOL_NS_GPL(name, space)
#define MODULE_LICENSE(text)
#define MODULE_DESCRIPTION(text)
#define MODULE_IMPORT_NS(text)

/* Complaints are counted; the answer to each request tells how many there were. */
void shim_complain(void);
static inline bool shim_complain_if(bool condition)
{
	if (unlikely(condition))
		shim_complain();
	return condition;
}
#define WARN_ON(condition) shim_complain_if(!!(condition))
#define WARN_ON_ONCE WARN_ON
#define WARN_ONCE(condition, ...) WARN_ON(condition)
#define pr_err(...) ((void)0)
#define pr_err_ratelimited(...) ((void)0)
#define pr_info(...) ((void)0)
#define dev_err(...) ((void)0)

/* Bits. */
#define BITS_PER_LONG 64
#define BIT(n) (1ul << (n))
#define BIT_ULL(n) (1ull << (n))
#define GENMASK_ULL(high, low) ((~0ull >> (63 - (high))) & (~0ull << (low)))
#define GENMASK(high, low) ((unsigned long)GENMASK_ULL(high, low))
#define __bf_shf(mask) __builtin_ctzll(mask)
#define FIELD_PREP(mask, value) (((u64)(value) << __bf_shf(mask)) & (mask))
#define FIELD_GET(mask, word) (((word) & (mask)) >> __bf_shf(mask))
#define ilog2(value) (63 - __builtin_clzll(value))
static inline unsigned int fls(u32 word)
{
	return word == 0 ? 0 : 32 - __builtin_clz(word);
}
static inline unsigned int fls64(u64 word)
{
	return word == 0 ? 0 : 64 - __builtin_clzll(word);
}
#define __ffs(word) ((unsigned long)__builtin_ctzl(word))
#define __ffs64(word) ((unsigned long)__builtin_ctzll(word))
#define __fls(word) ((unsigned long)(63 - __builtin_clzl(word)))
#define ffz(word) __ffs(~(unsigned long)(word))
#define upper_32_bits(value) ((u32)((u64)(value) >> 32))

/* Numbers. */
#define U8_MAX UCHAR_MAX
#define U32_MAX UINT_MAX
#define U64_MAX ULLONG_MAX
#define PAGE_SHIFT 12
#define PAGE_SIZE (1ul << PAGE_SHIFT)
#define PAGE_MASK (~(PAGE_SIZE - 1))
enum {
	SZ_4K = 1 << 12,
	SZ_16K = 1 << 14,
	SZ_64K = 1 << 16,
	SZ_1M = 1 << 20,
	SZ_2M = 1 << 21,
	SZ_16M = 1 << 24,
	SZ_32M = 1 << 25,
	SZ_512M = 1 << 29,
	SZ_1G = 1 << 30,
};
#define SZ_512G (1ull << 39)
#define DIV_ROUND_UP(value, by) (((value) + (by) - 1) / (by))
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define min_t(type, a, b) min((type)(a), (type)(b))
#define max_t(type, a, b) max((type)(a), (type)(b))
#define check_add_overflow(a, b, sum) __builtin_add_overflow(a, b, sum)

/*
 * Memory order: one thread, and no other reads the tables while it runs. So these cost nothing, also
 * where a kernel on this machine would wait for its stores (wmb, smp_mb).
 */
#define READ_ONCE(place) (*(const volatile __typeof__(place) *)&(place))
#define WRITE_ONCE(place, value) (*(volatile __typeof__(place) *)&(place) = (value))
#define barrier() __asm__ volatile("" ::: "memory")
#define smp_mb() barrier()
#define wmb() barrier()
#define dma_wmb() barrier()
#define cmpxchg_relaxed(place, old, new) __sync_val_compare_and_swap(place, old, new)
#define cmpxchg64_relaxed(place, old, new) __sync_val_compare_and_swap(place, old, new)
#define try_cmpxchg64(place, old, new)                                         \
	__atomic_compare_exchange_n(place, old, new, false, __ATOMIC_SEQ_CST, \
				    __ATOMIC_SEQ_CST)
#define try_cmpxchg_release try_cmpxchg64
#define try_cmpxchg64_release try_cmpxchg64
static inline void set_bit(unsigned int bit, unsigned long *words)
{
	words[bit / BITS_PER_LONG] |= 1ul << bit % BITS_PER_LONG;
}
typedef struct { char unused; } spinlock_t;
#define spin_lock_irqsave(lock, flags) ((void)(lock), (flags) = 0)
#define spin_unlock_irqrestore(lock, flags) ((void)(lock), (void)(flags))

/* Bytes. */
static inline void memset64(u64 *words, u64 value, size_t count)
{
	while (count-- > 0)
		*words++ = value;
}
#define memset_after(object, value, member)                                    \
	memset((char *)(object) + offsetof(__typeof__(*(object)), member) +    \
		       sizeof((object)->member),                               \
	       value,                                                          \
	       sizeof(*(object)) - sizeof((object)->member) -                  \
		       offsetof(__typeof__(*(object)), member))
/* No encrypted memory. */
#define __sme_set(address) (address)
#define __sme_clr(address) (address)

/* Errors in pointers. */
#define ERR_PTR(error) ((void *)(long)(error))
#define PTR_ERR(pointer) ((long)(pointer))
#define IS_ERR(pointer) ((unsigned long)(pointer) > -4096ul)

/* Lists. */
struct list_head {
	struct list_head *next, *prev;
};
static inline void INIT_LIST_HEAD(struct list_head *list)
{
	list->next = list->prev = list;
}

/* Table memory: blocks of the pool, zeroed, aligned to their size (shim.c). */
extern char *shim_pool;
/* Offset from a "physical" address to its byte. */
extern uintptr_t shim_offset;
void *shim_alloc(size_t bytes);
void shim_free(void *block);
struct list_head *shim_link(void *block);
static inline u64 virt_to_phys(const void *table)
{
	return (uintptr_t)table - shim_offset;
}
/* The empty entry leads nowhere, but Linux computes where that would be. */
static inline void *phys_to_virt(u64 address)
{
	return (void *)((uintptr_t)address + shim_offset);
}
#define __pa virt_to_phys
#define __va phys_to_virt

/* Other memory. */
#define GFP_KERNEL 0u
#define GFP_DMA 0u
#define __GFP_ZERO 0u
#define kmalloc_obj(object) calloc(1, sizeof(object))
#define kzalloc_obj(object) calloc(1, sizeof(object))
#define kfree free
#define SLAB_CACHE_DMA 0u
struct kmem_cache;
#define kmem_cache_create(name, bytes, align, flags, ctor) \
	((struct kmem_cache *)(uintptr_t)(bytes))
#define kmem_cache_zalloc(cache, gfp) shim_alloc((uintptr_t)(cache))
#define kmem_cache_free(cache, block) shim_free(block)
#define kmem_cache_destroy(cache) ((void)(cache))
#define kmemleak_ignore(block) ((void)0)
#define get_order(bytes) (bytes)
#define __get_free_pages(gfp, bytes) ((unsigned long)shim_alloc(bytes))
#define free_pages(block, bytes) shim_free((void *)(block))

/* Devices, which see memory as the processor does. */
struct device {
	int node;
};
#define dev_to_node(device) (-1)
#define NUMA_NO_NODE (-1)
#define DMA_TO_DEVICE 1
#define dma_map_single(device, table, bytes, direction) virt_to_phys(table)
#define dma_unmap_single(device, address, bytes, direction) ((void)0)
#define dma_mapping_error(device, address) 0
#define dma_sync_single_for_device(device, address, bytes, direction) ((void)0)

/* The core of the IOMMU code, as far as tables see it: linux/iommu.h. */
#define IOMMU_READ (1 << 0)
#define IOMMU_WRITE (1 << 1)
#define IOMMU_CACHE (1 << 2)
#define IOMMU_NOEXEC (1 << 3)
#define IOMMU_MMIO (1 << 4)
#define IOMMU_PRIV (1 << 5)
#define __IOMMU_DOMAIN_PAGING 1u
#define IOMMU_DIRTY_NO_CLEAR 1

struct iommu_domain {
	unsigned int type;
	bool is_iommupt;
	unsigned long pgsize_bitmap;
	struct {
		dma_addr_t aperture_start, aperture_end;
		bool force_aperture;
	} geometry;
};

struct iommu_pages_list {
	struct list_head pages;
};
/* One range, from `start` to `end` inclusive; none where `end` is 0. */
struct iommu_iotlb_gather {
	unsigned long start, end;
	size_t pgsize;
	struct {
		u8 leaf_levels_bitmap, table_levels_bitmap;
	} pt;
	struct iommu_pages_list freelist;
	bool queued;
};
static inline void iommu_iotlb_gather_init(struct iommu_iotlb_gather *gather)
{
	*gather = (struct iommu_iotlb_gather){ .start = ULONG_MAX };
	INIT_LIST_HEAD(&gather->freelist.pages);
}
/* Flush of what the unit caches, which costs nothing here; then the tables are freed. */
void iommu_iotlb_sync(struct iommu_domain *domain, struct iommu_iotlb_gather *gather);
static inline bool iommu_iotlb_gather_queued(const struct iommu_iotlb_gather *gather)
{
	return gather != NULL && gather->queued;
}
static inline bool iommu_iotlb_gather_is_disjoint(const struct iommu_iotlb_gather *gather,
						  unsigned long iova, size_t bytes)
{
	bool below = iova + bytes < gather->start, above = iova > gather->end + 1;

	return gather->end != 0 && (below || above);
}
static inline void iommu_iotlb_gather_add_range(struct iommu_iotlb_gather *gather,
						unsigned long iova, size_t bytes)
{
	gather->start = min(gather->start, iova);
	gather->end = max(gather->end, iova + bytes - 1);
}
/* A gather holds pages of one size without a gap between; others are flushed first. */
static inline void iommu_iotlb_gather_add_page(struct iommu_domain *domain,
					       struct iommu_iotlb_gather *gather,
					       unsigned long iova, size_t bytes)
{
	bool other = gather->pgsize != 0 && gather->pgsize != bytes;

	if (other || iommu_iotlb_gather_is_disjoint(gather, iova, bytes))
		iommu_iotlb_sync(domain, gather);
	gather->pgsize = bytes;
	iommu_iotlb_gather_add_range(gather, iova, bytes);
}

/* A bit for each page of 2^`shift` bytes from `first` on. */
struct iova_bitmap {
	u64 first;
	unsigned int shift;
	unsigned long *words;
};
struct iommu_dirty_bitmap {
	struct iova_bitmap *bitmap;
	struct iommu_iotlb_gather *gather;
};
void iova_bitmap_set(struct iova_bitmap *bitmap, u64 iova, size_t bytes);
static inline void iommu_dirty_bitmap_record(struct iommu_dirty_bitmap *dirty, u64 iova,
					     size_t bytes)
{
	if (dirty->bitmap)
		iova_bitmap_set(dirty->bitmap, iova, bytes);
	if (dirty->gather)
		iommu_iotlb_gather_add_range(dirty->gather, iova, bytes);
}

/* In the place of drivers/iommu/iommu-pages.h, whose guard this is. */
#define __IOMMU_PAGES_H
#define IOMMU_PAGES_LIST_INIT(list) \
	((struct iommu_pages_list){ { &(list).pages, &(list).pages } })
#define iommu_alloc_pages_node_sz(node, gfp, bytes) shim_alloc(bytes)
#define iommu_alloc_pages_sz(gfp, bytes) shim_alloc(bytes)
#define iommu_free_pages shim_free
void iommu_pages_list_add(struct iommu_pages_list *list, void *block);
void iommu_pages_list_splice(struct iommu_pages_list *from, struct iommu_pages_list *to);
void iommu_put_pages_list(struct iommu_pages_list *list);
#define iommu_pages_list_empty(list) ((list)->pages.next == &(list)->pages)
#define iommu_pages_start_incoherent(block, device) 0
#define iommu_pages_start_incoherent_list(list, device) 0
#define iommu_pages_stop_incoherent_list(list, device) ((void)0)
#define iommu_pages_free_incoherent(block, device) shim_free(block)
#define iommu_pages_flush_incoherent(device, block, offset, bytes) ((void)0)

#endif
