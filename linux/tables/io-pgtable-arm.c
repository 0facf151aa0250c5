// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The operations on Arm's long descriptors by the crate iopt, in the place of drivers/iommu/io-pgtable-arm.c.
 *
 * Entries are read and written by src/lib.rs alone; what is here says which attributes leaves have, how the unit gets
 * the root, and when it is flushed. Sections are those of the Arm Architecture Reference Manual (DDI 0487).
 *
 * A map is whole or nothing, and an unmap gives back the tables that it covers whole: in a queue of flushes they are freed
 * after its flush of everything, otherwise after one of what was unmapped, which then needs no other.
 *
 * Left out: 32-bit long descriptors and those of Mali, table pages from a driver's own allocator, the NS bits of
 * IO_PGTABLE_QUIRK_ARM_NS, and pgtable_walk. The first four are refused.
 */
#include <linux/dma-mapping.h>
#include <linux/io-pgtable.h>
#include <linux/sizes.h>
#include <linux/slab.h>

#include "io-pgtable-arm.h"
#include "tables.h"

/* Section D8.3.1, "Block descriptor and Page descriptor"; attributes of stage 1, then of stage 2. */
#define LEAF_SHARED(domain)	((u64)(domain) << 8)
#define LEAF_ACCESSED		BIT_ULL(10)
#define LEAF_NO_EXECUTE		GENMASK_ULL(54, 53)
#define S1_MEMORY(index)	((u64)(index) << 2)
#define S1_UNPRIVILEGED		BIT_ULL(6)
#define S1_READ_ONLY		BIT_ULL(7)
#define S1_NOT_GLOBAL		BIT_ULL(11)
#define S1_DIRTY_KEPT		BIT_ULL(51)
#define S2_MEMORY(attributes)	((u64)(attributes) << 2)
#define S2_READ			BIT_ULL(6)
#define S2_WRITE		BIT_ULL(7)

/* Fields of MAIR (section D8.6.1) that S1_MEMORY names, as drivers expect them. */
enum { MAIR_UNCACHED, MAIR_CACHED, MAIR_DEVICE, MAIR_OUTER_CACHED };
#define MAIR(index, attributes)	((u64)(attributes) << (8 * (index)))

/* MemAttr of stage 2 (section D8.6.5); with FEAT_S2FWB the first is 0b0110. */
enum { S2_DEVICE = 0x1, S2_UNCACHED = 0x5, S2_FORCED_CACHED = 0x6, S2_CACHED = 0xf };

/* In dmaspace_call.top. */
#define TOP_UPPER	BIT(6)

struct arm_table {
	struct io_pgtable iop;
	const struct dmaspace_arm *rust;
	u64 top;
	unsigned int granule_lg2;
};

static struct arm_table *table_of(struct io_pgtable_ops *ops)
{
	return container_of(io_pgtable_ops_to_pgtable(ops), struct arm_table, iop);
}

static struct device *incoherent(struct io_pgtable_cfg *cfg)
{
	return cfg->coherent_walk ? NULL : cfg->iommu_dev;
}

static struct dmaspace_call call_of(struct arm_table *table)
{
	return (struct dmaspace_call){
		.top = table->top,
		.sizes = table->iop.cfg.pgsize_bitmap,
		.device = incoherent(&table->iop.cfg),
		.node = dev_to_node(table->iop.cfg.iommu_dev),
	};
}

/* The range is one that the table can have. */
static bool is_inside(struct arm_table *table, unsigned long iova, size_t len)
{
	struct io_pgtable_cfg *cfg = &table->iop.cfg;
	u64 above = table->top & TOP_UPPER ? ~0ULL << cfg->ias : 0;
	u64 last;

	return len && !check_add_overflow((u64)iova, (u64)len - 1, &last) &&
	       (iova & (~0ULL << cfg->ias)) == above && (last & (~0ULL << cfg->ias)) == above;
}

static u64 leaf_bits(struct arm_table *table, int prot)
{
	unsigned long quirks = table->iop.cfg.quirks;
	u64 bits = LEAF_ACCESSED;

	bits |= LEAF_SHARED(prot & IOMMU_CACHE ? ARM_LPAE_TCR_SH_IS : ARM_LPAE_TCR_SH_OS);
	if (prot & IOMMU_NOEXEC)
		bits |= LEAF_NO_EXECUTE;
	if (table->iop.fmt == ARM_64_LPAE_S1) {
		bits |= S1_NOT_GLOBAL;
		/* Writable memory is readable. */
		if (!(prot & IOMMU_WRITE))
			bits |= S1_READ_ONLY;
		else if (quirks & IO_PGTABLE_QUIRK_ARM_HD)
			bits |= S1_DIRTY_KEPT;
		if (!(prot & IOMMU_PRIV))
			bits |= S1_UNPRIVILEGED;
		if (prot & IOMMU_MMIO)
			bits |= S1_MEMORY(MAIR_DEVICE);
		else if (prot & IOMMU_CACHE)
			bits |= S1_MEMORY(MAIR_CACHED);
		return bits;
	}
	if (prot & IOMMU_READ)
		bits |= S2_READ;
	if (prot & IOMMU_WRITE)
		bits |= S2_WRITE;
	if (prot & IOMMU_MMIO)
		bits |= S2_MEMORY(S2_DEVICE);
	else if (!(prot & IOMMU_CACHE))
		bits |= S2_MEMORY(S2_UNCACHED);
	else if (quirks & IO_PGTABLE_QUIRK_ARM_S2FWB)
		bits |= S2_MEMORY(S2_FORCED_CACHED);
	else
		bits |= S2_MEMORY(S2_CACHED);
	return bits;
}

/* No walk of the unit is in these tables, or comes to them, from here on. */
static void flush_and_free(struct arm_table *table, unsigned long iova, size_t len, size_t page,
			   const struct dmaspace_chain *chain)
{
	io_pgtable_tlb_flush_walk(&table->iop, iova, len, page);
	dmaspace_free_tables(incoherent(&table->iop.cfg), chain);
}

static int map_pages(struct io_pgtable_ops *ops, unsigned long iova, phys_addr_t pa, size_t size,
		     size_t count, int prot, gfp_t gfp, size_t *mapped)
{
	struct arm_table *table = table_of(ops);
	struct io_pgtable_cfg *cfg = &table->iop.cfg;
	struct dmaspace_call call = call_of(table);
	struct dmaspace_chain chain = {};
	size_t len = size * count;
	int error;

	if (WARN_ON(!size || (size & cfg->pgsize_bitmap) != size || !count))
		return -EINVAL;
	if (WARN_ON(!is_inside(table, iova, len) || (pa + (len - 1)) >> cfg->oas))
		return -ERANGE;
	if (!(prot & (IOMMU_READ | IOMMU_WRITE)))
		return -EINVAL;
	call.sizes &= GENMASK_ULL(__fls(size), 0);
	call.bits = leaf_bits(table, prot);
	call.gfp = gfp;
	this_cpu_inc(dmaspace_maps);
	error = table->rust->map(&call, iova, pa, len, false);
	/* An empty table may be where a large leaf is to be. */
	if (error == -EAGAIN) {
		table->rust->give_back(&call, iova, len, &chain);
		if (chain.count)
			flush_and_free(table, iova, len, size, &chain);
		error = table->rust->map(&call, iova, pa, len, true);
	}
	if (error == -EADDRINUSE) {
		WARN_ON(!(cfg->quirks & IO_PGTABLE_QUIRK_NO_WARN));
		return -EEXIST;
	}
	if (error)
		return error;
	*mapped += len;
	/* Before anything makes a device use the addresses. */
	wmb();
	return 0;
}

static size_t unmap_pages(struct io_pgtable_ops *ops, unsigned long iova, size_t size, size_t count,
			  struct iommu_iotlb_gather *gather)
{
	struct arm_table *table = table_of(ops);
	struct io_pgtable_cfg *cfg = &table->iop.cfg;
	bool queued = gather && iommu_iotlb_gather_queued(gather);
	struct dmaspace_call call = call_of(table);
	struct dmaspace_chain chain = {};
	size_t len = size * count, unmapped, at;
	unsigned int level;

	if (WARN_ON(!size || (size & cfg->pgsize_bitmap) != size || !is_inside(table, iova, len)))
		return 0;
	unmapped = table->rust->unmap(&call, iova, len, &chain);
	WARN_ON(unmapped < len && !(cfg->quirks & IO_PGTABLE_QUIRK_NO_WARN));
	if (chain.count && queued) {
		dmaspace_list_tables(&gather->freelist, incoherent(cfg), &chain);
	} else if (chain.count) {
		/* In steps of the smallest leaf that there was. */
		level = chain.leaf_levels ? __ffs(chain.leaf_levels) : 0;
		flush_and_free(table, iova, unmapped,
			       1UL << (table->granule_lg2 + level * (table->granule_lg2 - 3)), &chain);
	} else if (gather && !queued) {
		for (at = 0; at < unmapped; at += size)
			io_pgtable_tlb_add_page(&table->iop, gather, iova + at, size);
	}
	return unmapped;
}

static phys_addr_t iova_to_phys(struct io_pgtable_ops *ops, unsigned long iova)
{
	struct arm_table *table = table_of(ops);

	return is_inside(table, iova, 1) ? table->rust->translate(table->top, iova) : 0;
}

static int read_and_clear_dirty(struct io_pgtable_ops *ops, unsigned long iova, size_t size,
				unsigned long flags, struct iommu_dirty_bitmap *dirty)
{
	struct arm_table *table = table_of(ops);
	struct dmaspace_call call = call_of(table);
	/* Dirty entries that stay are in no unit's way. */
	struct iommu_dirty_bitmap only = { .bitmap = dirty->bitmap };
	bool clean = !(flags & IOMMU_DIRTY_NO_CLEAR);

	if (WARN_ON(!is_inside(table, iova, size)) || table->iop.fmt != ARM_64_LPAE_S1)
		return -EINVAL;
	return table->rust->dirty(&call, iova, size, clean, dmaspace_record, clean ? dirty : &only);
}

/* The field of TCR and VTCR for a size of addresses (IPS, PS), or a negative number. */
static int address_size(unsigned int bits)
{
	static const u8 sizes[] = { 32, 36, 40, 42, 44, 48, 52 };
	int i;

	for (i = 0; i < ARRAY_SIZE(sizes); i++)
		if (sizes[i] == bits)
			return i;
	return -EINVAL;
}

/* One granule, the processor's if the unit has it, otherwise the next smaller or larger one; 0: none. */
static unsigned int granule_lg2(unsigned long sizes)
{
	unsigned long known = sizes & (SZ_4K | SZ_16K | SZ_64K);

	if (known & PAGE_SIZE)
		return PAGE_SHIFT;
	if (known & ~PAGE_MASK)
		return __fls(known & ~PAGE_MASK);
	return known ? __ffs(known) : 0;
}

/* A table whose root is still to be told to the unit; what it can do is in `cfg`. */
static struct arm_table *alloc_table(enum io_pgtable_fmt fmt, struct io_pgtable_cfg *cfg,
				     u64 *levels)
{
	unsigned int lg2 = granule_lg2(cfg->pgsize_bitmap), most = lg2 == 16 ? 52 : 48;
	struct arm_table *table;
	struct device *dev = incoherent(cfg);
	void *root;
	u64 bytes;

	cfg->ias = min(cfg->ias, most);
	cfg->oas = min(cfg->oas, most);
	if (!lg2 || address_size(cfg->oas) < 0)
		return NULL;
	cfg->pgsize_bitmap &= BIT(lg2) | BIT(2 * lg2 - 3) |
			      (lg2 == 12 || (lg2 == 16 && cfg->oas > 48) ? BIT(3 * lg2 - 6) : 0);
	table = kzalloc(sizeof(*table), GFP_KERNEL);
	if (!table)
		return NULL;
	table->granule_lg2 = lg2;
	table->rust = &dmaspace_arm[(fmt == ARM_64_LPAE_S2) * 6 + (lg2 - 12) / 2 * 2 + !!dev];
	table->top = cfg->ias | (cfg->quirks & IO_PGTABLE_QUIRK_ARM_TTBR1 ? TOP_UPPER : 0);
	bytes = table->rust->root(table->top, levels);
	if (!bytes)
		goto no_table;
	root = iommu_alloc_pages_node_sz(dev_to_node(cfg->iommu_dev), GFP_KERNEL, max(bytes, 64));
	if (!root)
		goto no_table;
	if (dev && iommu_pages_start_incoherent(root, dev))
		goto no_root;
	table->top |= (uintptr_t)root;
	table->iop.fmt = fmt;
	table->iop.cfg = *cfg;
	table->iop.ops = (struct io_pgtable_ops){
		.map_pages = map_pages,
		.unmap_pages = unmap_pages,
		.iova_to_phys = iova_to_phys,
		.read_and_clear_dirty = read_and_clear_dirty,
	};
	/* The root is empty to the unit before that has it. */
	wmb();
	return table;

no_root:
	iommu_free_pages(root);
no_table:
	kfree(table);
	return NULL;
}

static void *root_of(const struct arm_table *table)
{
	return (void *)(uintptr_t)(table->top & PAGE_MASK);
}

static void free_table(struct io_pgtable *iop)
{
	struct arm_table *table = container_of(iop, struct arm_table, iop);
	struct dmaspace_call call = call_of(table);
	struct dmaspace_chain chain = {};

	table->rust->clear(&call, &chain);
	dmaspace_free_tables(call.device, &chain);
	if (call.device)
		iommu_pages_free_incoherent(root_of(table), call.device);
	else
		iommu_free_pages(root_of(table));
	kfree(table);
}

static struct io_pgtable *alloc_s1(struct io_pgtable_cfg *cfg, void *cookie)
{
	typeof(&cfg->arm_lpae_s1_cfg.tcr) tcr = &cfg->arm_lpae_s1_cfg.tcr;
	/* TG0 and TG1 number the granules differently. */
	static const u8 granules[2][3] = {
		{ ARM_LPAE_TCR_TG0_4K, ARM_LPAE_TCR_TG0_16K, ARM_LPAE_TCR_TG0_64K },
		{ ARM_LPAE_TCR_TG1_4K, ARM_LPAE_TCR_TG1_16K, ARM_LPAE_TCR_TG1_64K },
	};
	bool outer = cfg->quirks & IO_PGTABLE_QUIRK_ARM_OUTER_WBWA;
	struct arm_table *table;
	u64 levels;

	if (cfg->quirks & ~(IO_PGTABLE_QUIRK_ARM_TTBR1 | IO_PGTABLE_QUIRK_ARM_OUTER_WBWA |
			    IO_PGTABLE_QUIRK_ARM_HD | IO_PGTABLE_QUIRK_NO_WARN) ||
	    (cfg->coherent_walk && outer))
		return NULL;
	table = alloc_table(ARM_64_LPAE_S1, cfg, &levels);
	if (!table)
		return NULL;
	tcr->ips = address_size(cfg->oas);
	tcr->tg = granules[!!(table->top & TOP_UPPER)][(table->granule_lg2 - 12) / 2];
	tcr->sh = cfg->coherent_walk ? ARM_LPAE_TCR_SH_IS : ARM_LPAE_TCR_SH_OS;
	tcr->irgn = cfg->coherent_walk ? ARM_LPAE_TCR_RGN_WBWA : ARM_LPAE_TCR_RGN_NC;
	tcr->orgn = outer ? ARM_LPAE_TCR_RGN_WBWA : tcr->irgn;
	tcr->tsz = 64 - cfg->ias;
	cfg->arm_lpae_s1_cfg.mair = MAIR(MAIR_UNCACHED, 0x44) | MAIR(MAIR_CACHED, 0xff) |
				    MAIR(MAIR_DEVICE, 0x04) | MAIR(MAIR_OUTER_CACHED, 0xf4);
	cfg->arm_lpae_s1_cfg.ttbr = virt_to_phys(root_of(table));
	return &table->iop;
}

static struct io_pgtable *alloc_s2(struct io_pgtable_cfg *cfg, void *cookie)
{
	typeof(&cfg->arm_lpae_s2_cfg.vtcr) vtcr = &cfg->arm_lpae_s2_cfg.vtcr;
	static const u8 granules[] = { ARM_LPAE_TCR_TG0_4K, ARM_LPAE_TCR_TG0_16K,
				       ARM_LPAE_TCR_TG0_64K };
	struct arm_table *table;
	u64 levels;

	if (cfg->quirks & ~(IO_PGTABLE_QUIRK_ARM_S2FWB | IO_PGTABLE_QUIRK_NO_WARN))
		return NULL;
	table = alloc_table(ARM_64_LPAE_S2, cfg, &levels);
	if (!table)
		return NULL;
	vtcr->ps = address_size(cfg->oas);
	vtcr->tg = granules[(table->granule_lg2 - 12) / 2];
	vtcr->sh = cfg->coherent_walk ? ARM_LPAE_TCR_SH_IS : ARM_LPAE_TCR_SH_OS;
	vtcr->irgn = cfg->coherent_walk ? ARM_LPAE_TCR_RGN_WBWA : ARM_LPAE_TCR_RGN_NC;
	vtcr->orgn = vtcr->irgn;
	vtcr->tsz = 64 - cfg->ias;
	/* SL0 counts levels from two with pages of 4K, from one with others. */
	vtcr->sl = levels - (table->granule_lg2 == 12 ? 2 : 1);
	cfg->arm_lpae_s2_cfg.vttbr = virt_to_phys(root_of(table));
	return &table->iop;
}

static struct io_pgtable *alloc_none(struct io_pgtable_cfg *cfg, void *cookie)
{
	return NULL;
}

struct io_pgtable_init_fns io_pgtable_arm_64_lpae_s1_init_fns = { .alloc = alloc_s1, .free = free_table };
struct io_pgtable_init_fns io_pgtable_arm_64_lpae_s2_init_fns = { .alloc = alloc_s2, .free = free_table };
struct io_pgtable_init_fns io_pgtable_arm_32_lpae_s1_init_fns = { .alloc = alloc_none };
struct io_pgtable_init_fns io_pgtable_arm_32_lpae_s2_init_fns = { .alloc = alloc_none };
struct io_pgtable_init_fns io_pgtable_arm_mali_lpae_init_fns = { .alloc = alloc_none };
