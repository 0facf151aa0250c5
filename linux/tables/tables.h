/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Between iommu_pt.h and io-pgtable-arm.c, which are C, and src/lib.rs. Addresses and lengths are bytes. */
#ifndef DMASPACE_TABLES_H
#define DMASPACE_TABLES_H

#include <linux/iommu.h>
#include <linux/percpu.h>
#include <linux/types.h>

#include "iommu-pages.h"

struct iommu_run;

/* A table, as an operation needs it. */
struct dmaspace_call {
	/* The root's virtual address, and in its lowest bits: the number of levels less one (3
	 * bits); on Arm (7 bits) the bits of an input address, and whether they are those of the upper half. */
	u64 top;
	/* The sizes that leaves may have. */
	u64 sizes;
	/* Bits of the leaves of a map, beside address and size. */
	u64 bits;
	/* The unit, if it reads memory past the processor's caches. */
	struct device *device;
	/* Where tables are allocated, and how. */
	int node;
	gfp_t gfp;
};

/* Tables that are not linked, chained by physical addresses in the first words of their list elements. */
struct dmaspace_chain {
	u64 head;
	u64 count;
	/* The levels of the leaves that were removed: bit n for level n. */
	u32 leaf_levels;
	/* Something above the leaves is to be invalidated. */
	u32 tables;
};

#ifndef CONFIG_ARM64
/*
 * The functions of a format. The caller holds the range: no other operation on an address of it is under way. 0 or an
 * error's number; unmap: bytes; translate: a physical address, or 0. Where units of the format may read memory past the
 * caches, those that store have a second one for these. resize: the largest leaf of a range; a cut, if `len` is 0; if
 * `largest` is 0, empty tables are freed.
 */
#define DMASPACE_MAPPING(name, suffix)                                                           \
	int dmaspace_##name##_map##suffix(const struct dmaspace_call *call, u64 iova, u64 pa,    \
					  u64 len, struct dmaspace_chain *chain);                \
	u64 dmaspace_##name##_unmap##suffix(const struct dmaspace_call *call, u64 iova, u64 len, \
					    struct dmaspace_chain *chain);                       \
	int dmaspace_##name##_map_runs##suffix(const struct dmaspace_call *call, u64 iova,       \
					       const struct iommu_run *runs, size_t count,       \
					       struct dmaspace_chain *chain);                    \
	u64 dmaspace_##name##_unmap_runs##suffix(const struct dmaspace_call *call, u64 iova,     \
						 u64 len, u64 most, u64 room,                    \
						 struct dmaspace_chain *chain,                   \
						 void (*each)(void *to, u64 pa, u64 len),        \
						 void *to);                                      \
	int dmaspace_##name##_resize##suffix(const struct dmaspace_call *call, u64 iova,         \
					     u64 len, u64 largest,                               \
					     void (*flush)(void *to, u64 iova, u64 len,          \
							   u32 leaf_levels, bool tables),        \
					     void *to)
#define DMASPACE_FORMAT(name)                                                                    \
	DMASPACE_MAPPING(name, );                                                                \
	DMASPACE_MAPPING(name, _incoherent);                                                     \
	u64 dmaspace_##name##_translate(u64 top, u64 iova);                                      \
	int dmaspace_##name##_dirty(const struct dmaspace_call *call, u64 iova, u64 len,         \
				    bool clean, void (*each)(void *to, u64 iova, u64 len),       \
				    void *to);                                                   \
	int dmaspace_##name##_set_dirty(const struct dmaspace_call *call, u64 iova);             \
	int dmaspace_##name##_raise(const struct dmaspace_call *call, u8 levels, u64 *root,      \
				    struct dmaspace_chain *chain);                               \
	void dmaspace_##name##_collect(const struct dmaspace_call *call,                         \
				       struct dmaspace_chain *chain);                            \
	u64 dmaspace_##name##_sizes(u8 levels)

DMASPACE_FORMAT(amdv1);
DMASPACE_FORMAT(amdv1_mock);
DMASPACE_FORMAT(riscv_64);
DMASPACE_FORMAT(vtdss);
DMASPACE_FORMAT(x86_64);
#else
/* The functions of a format of Arm's, under the same contract. */
struct dmaspace_arm {
	/* -EAGAIN, unless empty tables are given back: one may be where a large leaf is to be. */
	int (*map)(const struct dmaspace_call *call, u64 iova, u64 pa, u64 len, bool given_back);
	u64 (*unmap)(const struct dmaspace_call *call, u64 iova, u64 len,
		     struct dmaspace_chain *chain);
	/* Unlinks the empty tables that the range covers whole. */
	void (*give_back)(const struct dmaspace_call *call, u64 iova, u64 len,
			  struct dmaspace_chain *chain);
	/* Unlinks all tables but the root. */
	void (*clear)(const struct dmaspace_call *call, struct dmaspace_chain *chain);
	u64 (*translate)(u64 top, u64 iova);
	int (*dirty)(const struct dmaspace_call *call, u64 iova, u64 len, bool clean,
		     void (*each)(void *to, u64 iova, u64 len), void *to);
	/* Bytes of the root of a table whose root's address has these lowest bits; 0: there is no such table. */
	u64 (*root)(u64 bits, u64 *levels);
};

/* Functions by stage, granule (4K, 16K, 64K), and whether the unit reads memory past the processor's caches. */
extern const struct dmaspace_arm dmaspace_arm[2 * 3 * 2];
#endif

/* Where the direct map and the array of struct page have physical address 0. */
extern unsigned long dmaspace_direct, dmaspace_pages;

/* Maps so far, for those who want to know whose tables these are. */
DECLARE_PER_CPU(unsigned long, dmaspace_maps);
/* Unmaps that returned runs. */
DECLARE_PER_CPU(unsigned long, dmaspace_unmaps);

#ifndef CONFIG_ARM64
/* Each page by itself, as before tables were filled by ranges: for measurements. */
extern bool dmaspace_one;
#endif

/* A table of zeroes, by its physical address; 0: there is none. */
u64 dmaspace_allocate(const struct dmaspace_call *call, u64 bytes);
/* One that was not linked. */
void dmaspace_free(const struct dmaspace_call *call, u64 table);
/* Units that read past the caches find these entries. */
void dmaspace_flush(const struct dmaspace_call *call, void *entries, size_t bytes);
void __noreturn dmaspace_panic(void);

/* The tables of a chain, to be freed with a list. */
static inline void dmaspace_list_tables(struct iommu_pages_list *list, struct device *incoherent,
					const struct dmaspace_chain *chain)
{
	struct iommu_pages_list own = IOMMU_PAGES_LIST_INIT(own);
	u64 table = chain->head, left;

	for (left = chain->count; left; left--) {
		void *virt = __va(table);

		table = *(u64 *)&virt_to_ioptdesc(virt)->iopt_freelist_elm;
		iommu_pages_list_add(&own, virt);
	}
	if (incoherent)
		iommu_pages_stop_incoherent_list(&own, incoherent);
	iommu_pages_list_splice(&own, list);
}

static inline void dmaspace_free_tables(struct device *incoherent, const struct dmaspace_chain *chain)
{
	struct iommu_pages_list list = IOMMU_PAGES_LIST_INIT(list);

	dmaspace_list_tables(&list, incoherent, chain);
	iommu_put_pages_list(&list);
}

/* Records dirty memory in an iommu_dirty_bitmap. */
static inline void dmaspace_record(void *to, u64 iova, u64 len)
{
	iommu_dirty_bitmap_record(to, iova, len);
}

#endif
