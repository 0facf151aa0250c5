/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Between iommu_pt.h, which is C, and src/lib.rs. Addresses and lengths are bytes. */
#ifndef DMASPACE_TABLES_H
#define DMASPACE_TABLES_H

#include <linux/percpu.h>
#include <linux/types.h>

struct pt_iommu;

/* What an operation needs to know of its table. */
struct dmaspace_call {
	/* The root's virtual address, and in its lowest three bits the number of levels less one. */
	u64 top;
	/* The sizes that leaves may have. */
	u64 sizes;
	/* Of the leaves of a map, beside address and size. */
	u64 bits;
	/* Whose allocations are made with these flags. */
	struct pt_iommu *iommu;
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

/*
 * The functions of a format. The caller holds the range: no other operation on an address of it is under way. 0 or an
 * error's number; unmap: bytes; translate: a physical address, or 0. Where units of the format may read memory past the
 * caches, there is a second pair for these.
 */
#define DMASPACE_MAPPING(name, suffix)                                                           \
	int dmaspace_##name##_map##suffix(const struct dmaspace_call *call, u64 iova, u64 pa,    \
					  u64 len, struct dmaspace_chain *chain);                \
	u64 dmaspace_##name##_unmap##suffix(const struct dmaspace_call *call, u64 iova, u64 len, \
					    struct dmaspace_chain *chain)
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
DMASPACE_FORMAT(vtdss);
DMASPACE_FORMAT(x86_64);

/* Where the direct map and the array of struct page have physical address 0. */
extern unsigned long dmaspace_direct, dmaspace_pages;

/* Maps so far, for those who want to know whose tables these are. */
DECLARE_PER_CPU(unsigned long, dmaspace_maps);

/* Each page by itself, as before tables were filled by ranges: for measurements. */
extern bool dmaspace_one;

/* A table of zeroes, by its physical address; 0: there is none. */
u64 dmaspace_allocate(struct pt_iommu *iommu, gfp_t gfp);
/* One that was not linked. */
void dmaspace_free(struct pt_iommu *iommu, u64 table);
/* Units that read past the caches find these entries. */
void dmaspace_flush(struct pt_iommu *iommu, void *entries, size_t bytes);
void __noreturn dmaspace_panic(void);

#endif
