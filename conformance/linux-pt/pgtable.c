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
		.iommu_dev = &device,
	};
	if (config->options & DIRTY)
		settings.quirks |= IO_PGTABLE_QUIRK_ARM_HD;
	if (config->options & UPPER)
		settings.quirks |= IO_PGTABLE_QUIRK_ARM_TTBR1;
	if (config->options & FORCED_WRITE_BACK)
		settings.quirks |= IO_PGTABLE_QUIRK_ARM_S2FWB;
	table = functions->alloc(&settings, NULL);
	if (table == NULL)
		return EINVAL;
	table->fmt = name_of(config->format);
	table->cookie = NULL;
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

const struct operations pgtable_operations = {
	create, map, unmap, translate, geometry, destroy,
};
