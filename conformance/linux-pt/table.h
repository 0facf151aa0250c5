/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* A table of Linux, whatever its format: what the server does with it. */
#ifndef DMASPACE_TABLE_H
#define DMASPACE_TABLE_H

#include "shim.h"

/* The numbers are part of the protocol: src/server.rs. */
enum format {
	AMD_V1,
	AMD_V1_GROWING,
	X86_64,
	VTD_SS,
	RISCV,
	ARM_S1,
	ARM_S2,
	ARM_SHORT,
	DART_1,
	DART_2,
};

enum option {
	/* The unit does not see the processor's caches when it walks. */
	INCOHERENT = 1 << 0,
	/* Accesses are snooped whatever the device asks for. */
	FORCE_COHERENT = 1 << 1,
	SIGN_EXTENDED = 1 << 2,
	SVNAPOT = 1 << 3,
	SVPBMT = 1 << 4,
	/* The unit keeps dirty state. */
	DIRTY = 1 << 5,
	/* For the top of the address space. */
	UPPER = 1 << 6,
	FORCED_WRITE_BACK = 1 << 7,
	/* Table memory is recycled (pool.h), and lies in huge pages. */
	RECYCLED = 1 << 8,
	HUGE_MEMORY = 1 << 9,
};

struct config {
	enum format format;
	u64 options;
	unsigned int input_bits, output_bits;
	/* Used by generic_pt; io-pgtable derives them from the sizes. */
	unsigned int levels;
	/* Used by io-pgtable; generic_pt derives them from the format. */
	u64 page_sizes;
};

struct geometry {
	u64 page_sizes;
	unsigned int levels, roots;
	u64 root[4];
};

/* Linux's flags for READ and WRITE, in memory that is coherent. */
#define TIMED_PROT (IOMMU_READ | IOMMU_WRITE | IOMMU_CACHE)

/*
 * Equal operations that are timed together: each of `count` pages of `page` bytes, at `address`,
 * the first at `iova` and each next one `stride` bytes further.
 */
struct batch {
	u64 iova, address, stride;
	u64 page, count;
	unsigned int operations;
	/* Linux chooses the sizes; `page` is the smallest. */
	bool chosen;
	/* Everything will be flushed later: nothing but tables is gathered. */
	bool queued;
};

/* 0, or an errno. A map that fails leaves nothing mapped of what it was asked for. */
struct operations {
	int (*create)(const struct config *config);
	int (*map)(u64 iova, u64 address, u64 bytes, int prot);
	/* Bytes that are unmapped now. */
	u64 (*unmap)(u64 iova, u64 bytes);
	/* 0 where nothing is mapped. */
	u64 (*translate)(u64 iova);
	void (*geometry)(struct geometry *geometry);
	void (*destroy)(void);

	/*
	 * Timed work (timing.c): the loops lie here, so that nothing is between two operations but
	 * the indirect call that Linux's core makes too.
	 */
	int (*map_batch)(const struct batch *batch);
	int (*unmap_batch)(const struct batch *batch);
	/* Each operation maps and then unmaps. */
	int (*cycle_batch)(const struct batch *batch);
	/* The sum of all translations. */
	u64 (*translate_all)(const u64 *iovas, size_t count);
	/* EOPNOTSUPP where the format has no dirty state here. */
	int (*harvest)(u64 iova, u64 bytes, struct iova_bitmap *bitmap);
	/* From now on leaves have these sizes only. */
	void (*restrict_sizes)(u64 sizes);
};

extern const struct operations generic_operations, pgtable_operations;

/* The AMD format with its options off (amdv1.c). */
struct pt_iommu_amdv1;
struct pt_iommu_amdv1_cfg;
struct pt_iommu_amdv1_hw_info;
int plain_amdv1_init(struct pt_iommu_amdv1 *table, const struct pt_iommu_amdv1_cfg *config,
		     gfp_t gfp);
void plain_amdv1_hw_info(struct pt_iommu_amdv1 *table, struct pt_iommu_amdv1_hw_info *info);
phys_addr_t plain_amdv1_iova_to_phys(struct iommu_domain *domain, dma_addr_t iova);
int plain_amdv1_read_and_clear_dirty(struct iommu_domain *domain, unsigned long iova, size_t bytes,
				     unsigned long flags, struct iommu_dirty_bitmap *dirty);

#endif
