/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Tables of io-pgtable, which maps and unmaps pages of one size at a time: what chooses the sizes
 * is its caller, here as in Linux.
 */
#include "table.h"

#include <linux/io-pgtable.h>

static struct io_pgtable_cfg settings;
static const struct io_pgtable_init_fns *functions;
static struct io_pgtable *table;
static struct device device;

static const struct io_pgtable_init_fns *functions_of(enum format format)
{
	switch (format) {
	case ARM_S1:
		return &io_pgtable_arm_64_lpae_s1_init_fns;
	case ARM_S2:
		return &io_pgtable_arm_64_lpae_s2_init_fns;
	case ARM_SHORT:
		return &io_pgtable_arm_v7s_init_fns;
	case DART_1:
	case DART_2:
		return &io_pgtable_apple_dart_init_fns;
	default:
		return NULL;
	}
}

static enum io_pgtable_fmt name_of(enum format format)
{
	switch (format) {
	case ARM_S1:
		return ARM_64_LPAE_S1;
	case ARM_S2:
		return ARM_64_LPAE_S2;
	case ARM_SHORT:
		return ARM_V7S;
	case DART_1:
		return APPLE_DART;
	default:
		return APPLE_DART2;
	}
}

/*
 * A unit that caches nothing. Pages are gathered one by one, as the drivers of Arm's units do where
 * flushes are not put off.
 */
static struct iommu_domain domain;

static void flush_all(void *cookie)
{
	(void)cookie;
}

static void flush_walk(unsigned long iova, size_t bytes, size_t granule, void *cookie)
{
	(void)iova;
	(void)bytes;
	(void)granule;
	(void)cookie;
}

static void add_page(struct iommu_iotlb_gather *gather, unsigned long iova, size_t granule,
		     void *cookie)
{
	iommu_iotlb_gather_add_page(cookie, gather, iova, granule);
}

static const struct iommu_flush_ops flush_operations = {
	.tlb_flush_all = flush_all,
	.tlb_flush_walk = flush_walk,
	.tlb_add_page = add_page,
};

static int create(const struct config *config)
{
	functions = functions_of(config->format);
	if (functions == NULL)
		return EINVAL;
	settings = (struct io_pgtable_cfg){
		.pgsize_bitmap = config->page_sizes,
		.ias = config->input_bits,
		.oas = config->output_bits,
		.coherent_walk = !(config->options & INCOHERENT),
		.tlb = &flush_operations,
		.iommu_dev = &device,
	};
	if (config->options & DIRTY)
		settings.quirks |= IO_PGTABLE_QUIRK_ARM_HD;
	if (config->options & UPPER)
		settings.quirks |= IO_PGTABLE_QUIRK_ARM_TTBR1;
	if (config->options & FORCED_WRITE_BACK)
		settings.quirks |= IO_PGTABLE_QUIRK_ARM_S2FWB;
	table = functions->alloc(&settings, &domain);
	if (table == NULL)
		return EINVAL;
	table->fmt = name_of(config->format);
	table->cookie = &domain;
	table->cfg = settings;
	return 0;
}

/*
 * The largest page that both addresses and the length allow, and how many of them come one after
 * the other before a larger one does.
 */
static u64 choose(u64 iova, u64 address, u64 bytes, u64 *count)
{
	u64 sizes = settings.pgsize_bitmap, chosen = 0, next = 0;

	for (u64 size = 1; size != 0; size <<= 1) {
		if (!(sizes & size))
			continue;
		if (size > bytes || ((iova | address) & (size - 1))) {
			next = size;
			break;
		}
		chosen = size;
	}
	if (chosen == 0)
		return 0;
	if (next != 0 && ((iova ^ address) & (next - 1)) == 0) {
		u64 before = -iova & (next - 1);

		if (before < bytes && bytes - before >= next)
			bytes = before;
	}
	*count = bytes / chosen;
	return chosen;
}

static u64 unmap(u64 iova, u64 bytes)
{
	struct iommu_iotlb_gather gather;
	u64 done = 0;

	iommu_iotlb_gather_init(&gather);
	while (done < bytes) {
		u64 count, size = choose(iova + done, iova + done, bytes - done, &count);

		if (size == 0)
			break;
		u64 step = table->ops.unmap_pages(&table->ops, iova + done, size, count, &gather);

		if (step == 0)
			break;
		done += step;
	}
	return done;
}

static int map(u64 iova, u64 address, u64 bytes, int prot)
{
	u64 done = 0;
	int result = 0;

	while (result == 0 && done < bytes) {
		u64 count, size = choose(iova + done, address + done, bytes - done, &count);
		size_t mapped = 0;

		if (size == 0) {
			result = -EINVAL;
			break;
		}
		result = table->ops.map_pages(&table->ops, iova + done, address + done, size, count,
					      prot, GFP_KERNEL, &mapped);
		done += mapped;
	}
	if (result != 0 && done != 0)
		unmap(iova, done);
	return -result;
}

static u64 translate(u64 iova)
{
	return table->ops.iova_to_phys(&table->ops, iova);
}

/* Levels are known to the caller; these tables tell them in the terms of their registers. */
static void geometry(struct geometry *geometry)
{
	geometry->page_sizes = settings.pgsize_bitmap;
	geometry->levels = 0;
	geometry->roots = 1;
	switch (table->fmt) {
	case ARM_64_LPAE_S1:
		geometry->root[0] = settings.arm_lpae_s1_cfg.ttbr;
		break;
	case ARM_64_LPAE_S2:
		geometry->root[0] = settings.arm_lpae_s2_cfg.vttbr;
		break;
	case ARM_V7S:
		/* The bits below hold attributes of the walk. */
		geometry->root[0] = settings.arm_v7s_cfg.ttbr & ~0x3fffull;
		break;
	default:
		geometry->roots = settings.apple_dart_cfg.n_ttbrs;
		/* The registers count as a level there. */
		geometry->levels = settings.apple_dart_cfg.n_levels - 1;
		memcpy(geometry->root, settings.apple_dart_cfg.ttbr, sizeof geometry->root);
	}
}

static void destroy(void)
{
	functions->free(table);
}

static inline int map_one(u64 iova, const struct batch *batch)
{
	u64 bytes = batch->count * batch->page, done = 0;

	while (done < bytes) {
		u64 size = batch->page, count = (bytes - done) / size;
		size_t mapped = 0;

		if (batch->chosen)
			size = choose(iova + done, batch->address + done, bytes - done, &count);
		int result = table->ops.map_pages(&table->ops, iova + done, batch->address + done,
						  size, count, TIMED_PROT, GFP_KERNEL, &mapped);

		if (result != 0)
			return result;
		done += mapped;
	}
	return 0;
}

/* Sizes that are chosen take tables that lie below with them. */
static inline u64 unmap_one(u64 iova, const struct batch *batch)
{
	u64 bytes = batch->count * batch->page, done = 0;
	struct iommu_iotlb_gather gather;

	iommu_iotlb_gather_init(&gather);
	gather.queued = batch->queued;
	while (done < bytes) {
		u64 size = batch->page, count = (bytes - done) / size;

		if (batch->chosen)
			size = choose(iova + done, iova + done, bytes - done, &count);
		u64 step = table->ops.unmap_pages(&table->ops, iova + done, size, count, &gather);

		if (step == 0)
			break;
		done += step;
	}
	return done;
}

static int pgtable_map_batch(const struct batch *batch)
{
	u64 iova = batch->iova;

	for (unsigned int i = 0; i < batch->operations; i++, iova += batch->stride) {
		int result = map_one(iova, batch);

		if (result != 0)
			return -result;
	}
	return 0;
}

static int pgtable_unmap_batch(const struct batch *batch)
{
	u64 iova = batch->iova;

	for (unsigned int i = 0; i < batch->operations; i++, iova += batch->stride)
		if (unmap_one(iova, batch) != batch->count * batch->page)
			return EFAULT;
	return 0;
}

/* Mapped in pages of the size that was asked for, unmapped as the core does. */
static int pgtable_cycle_batch(const struct batch *batch)
{
	struct batch back = *batch;
	u64 iova = batch->iova;

	back.chosen = true;
	for (unsigned int i = 0; i < batch->operations; i++, iova += batch->stride) {
		int result = map_one(iova, batch);

		if (result != 0)
			return -result;
		if (unmap_one(iova, &back) != batch->count * batch->page)
			return EFAULT;
	}
	return 0;
}

static u64 pgtable_translate_all(const u64 *iovas, size_t count)
{
	u64 sum = 0;

	for (size_t i = 0; i < count; i++)
		sum += table->ops.iova_to_phys(&table->ops, iovas[i]);
	return sum;
}

/* Only stage 1 has dirty state here; asked for another, Linux complains. */
static int pgtable_harvest(u64 iova, u64 bytes, struct iova_bitmap *bitmap)
{
	struct iommu_iotlb_gather gather;
	struct iommu_dirty_bitmap dirty = { bitmap, &gather };

	if (table->fmt != ARM_64_LPAE_S1 || table->ops.read_and_clear_dirty == NULL)
		return EOPNOTSUPP;
	iommu_iotlb_gather_init(&gather);
	return -table->ops.read_and_clear_dirty(&table->ops, iova, bytes, 0, &dirty);
}

/* The caller says the size of each page. */
static void restrict_sizes(u64 sizes)
{
	(void)sizes;
}

const struct operations pgtable_operations = {
	create,
	map,
	unmap,
	translate,
	geometry,
	destroy,
	pgtable_map_batch,
	pgtable_unmap_batch,
	pgtable_cycle_batch,
	pgtable_translate_all,
	pgtable_harvest,
	restrict_sizes,
};
