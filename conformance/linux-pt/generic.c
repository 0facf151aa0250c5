/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Tables of generic_pt, which maps and unmaps ranges by itself. */
#include "table.h"

#include <linux/generic_pt/iommu.h>

static union {
	struct pt_iommu iommu;
	struct pt_iommu_amdv1 amdv1;
	struct pt_iommu_x86_64 x86_64;
	struct pt_iommu_vtdss vtdss;
	struct pt_iommu_riscv_64 riscv;
} table;
static struct config config;
static struct device device;
static spinlock_t top_lock;

/* A top that grows asks its driver for a lock, and tells it. */
static spinlock_t *get_top_lock(struct pt_iommu *iommu)
{
	(void)iommu;
	return &top_lock;
}

static void change_top(struct pt_iommu *iommu, phys_addr_t top, unsigned int level)
{
	(void)iommu;
	(void)top;
	(void)level;
}

static const struct pt_iommu_driver_ops driver_ops = {
	.change_top = change_top,
	.get_top_lock = get_top_lock,
};

static unsigned int features(void)
{
	unsigned int bits = BIT(PT_FEAT_FLUSH_RANGE);

	if (config.options & INCOHERENT)
		bits |= BIT(PT_FEAT_DMA_INCOHERENT);
	if (config.options & SIGN_EXTENDED)
		bits |= BIT(PT_FEAT_SIGN_EXTEND);
	if (config.options & SVNAPOT)
		bits |= BIT(PT_FEAT_RISCV_SVNAPOT_64K);
	if (config.options & SVPBMT)
		bits |= BIT(PT_FEAT_RISCV_SVPBMT);
	if (config.options & FORCE_COHERENT)
		bits |= config.format == VTD_SS ? BIT(PT_FEAT_VTDSS_FORCE_COHERENCE) :
						  BIT(PT_FEAT_AMDV1_FORCE_COHERENCE);
	/* Features forced on in Linux's own files: without its checks it wants to be asked for them. */
	if (config.format == AMD_V1_GROWING)
		bits |= BIT(PT_FEAT_DYNAMIC_TOP) | BIT(PT_FEAT_AMDV1_ENCRYPT_TABLES);
	if (config.format == RISCV)
		bits |= BIT(PT_FEAT_DETAILED_GATHER);
	return bits;
}

static int create(const struct config *wanted)
{
	config = *wanted;
	memset(&table, 0, sizeof table);
	table.iommu.iommu_device = &device;
	table.iommu.driver_ops = &driver_ops;
	struct pt_iommu_cfg common = {
		.features = features(),
		.hw_max_vasz_lg2 = config.input_bits,
		.hw_max_oasz_lg2 = config.output_bits,
	};
	unsigned int top = config.levels - 1;

	switch (config.format) {
	case AMD_V1: {
		struct pt_iommu_amdv1_cfg amdv1 = { common, top };
		return -plain_amdv1_init(&table.amdv1, &amdv1, GFP_KERNEL);
	}
	case AMD_V1_GROWING: {
		struct pt_iommu_amdv1_cfg amdv1 = { common, top };
		return -pt_iommu_amdv1_init(&table.amdv1, &amdv1, GFP_KERNEL);
	}
	case X86_64: {
		struct pt_iommu_x86_64_cfg x86_64 = { common, top };
		return -pt_iommu_x86_64_init(&table.x86_64, &x86_64, GFP_KERNEL);
	}
	case VTD_SS: {
		struct pt_iommu_vtdss_cfg vtdss = { common, top };
		return -pt_iommu_vtdss_init(&table.vtdss, &vtdss, GFP_KERNEL);
	}
	case RISCV: {
		struct pt_iommu_riscv_64_cfg riscv = { common };
		return -pt_iommu_riscv_64_init(&table.riscv, &riscv, GFP_KERNEL);
	}
	default:
		return EINVAL;
	}
}

static u64 unmap(u64 iova, u64 bytes)
{
	struct iommu_iotlb_gather gather;

	iommu_iotlb_gather_init(&gather);
	u64 unmapped = table.iommu.ops->unmap_range(&table.iommu, iova, bytes, &gather);

	iommu_iotlb_sync(&table.iommu.domain, &gather);
	return unmapped;
}

static int map(u64 iova, u64 address, u64 bytes, int prot)
{
	size_t mapped = 0;
	int result = table.iommu.ops->map_range(&table.iommu, iova, address, bytes, prot,
						GFP_KERNEL, &mapped);

	if (result != 0 && mapped != 0)
		unmap(iova, mapped);
	return -result;
}

/* Operations of a domain, as a driver would have them. */
struct domain_operations {
	phys_addr_t (*iova_to_phys)(struct iommu_domain *domain, dma_addr_t iova);
	int (*read_and_clear_dirty)(struct iommu_domain *domain, unsigned long iova, size_t bytes,
				    unsigned long flags, struct iommu_dirty_bitmap *dirty);
};

static const struct domain_operations *domain_operations(void)
{
	static const struct domain_operations of[] = {
		[AMD_V1] = { plain_amdv1_iova_to_phys, plain_amdv1_read_and_clear_dirty },
		[AMD_V1_GROWING] = { pt_iommu_amdv1_iova_to_phys,
				     pt_iommu_amdv1_read_and_clear_dirty },
		[X86_64] = { pt_iommu_x86_64_iova_to_phys, pt_iommu_x86_64_read_and_clear_dirty },
		[VTD_SS] = { pt_iommu_vtdss_iova_to_phys, pt_iommu_vtdss_read_and_clear_dirty },
		[RISCV] = { pt_iommu_riscv_64_iova_to_phys,
			    pt_iommu_riscv_64_read_and_clear_dirty },
	};

	return &of[config.format];
}

static u64 translate(u64 iova)
{
	return domain_operations()->iova_to_phys(&table.iommu.domain, iova);
}

/* Root for the unit, as each format's driver learns it. */
static void geometry(struct geometry *geometry)
{
	geometry->page_sizes = table.iommu.domain.pgsize_bitmap;
	geometry->roots = 1;
	switch (config.format) {
	case AMD_V1:
	case AMD_V1_GROWING: {
		struct pt_iommu_amdv1_hw_info info;

		if (config.format == AMD_V1)
			plain_amdv1_hw_info(&table.amdv1, &info);
		else
			pt_iommu_amdv1_hw_info(&table.amdv1, &info);
		geometry->root[0] = info.host_pt_root;
		geometry->levels = info.mode;
		break;
	}
	case X86_64: {
		struct pt_iommu_x86_64_hw_info info;

		pt_iommu_x86_64_hw_info(&table.x86_64, &info);
		geometry->root[0] = info.gcr3_pt;
		geometry->levels = info.levels;
		break;
	}
	case VTD_SS: {
		struct pt_iommu_vtdss_hw_info info;

		pt_iommu_vtdss_hw_info(&table.vtdss, &info);
		geometry->root[0] = info.ssptptr;
		geometry->levels = info.aw + 2;
		break;
	}
	default: {
		struct pt_iommu_riscv_64_hw_info info;

		pt_iommu_riscv_64_hw_info(&table.riscv, &info);
		geometry->root[0] = info.ppn << PAGE_SHIFT;
		geometry->levels = info.fsc_iosatp_mode - 5;
		break;
	}
	}
}

static void destroy(void)
{
	pt_iommu_deinit(&table.iommu);
}

static inline int map_one(u64 iova, const struct batch *batch)
{
	size_t mapped = 0;

	return table.iommu.ops->map_range(&table.iommu, iova, batch->address,
					  batch->count * batch->page, TIMED_PROT, GFP_KERNEL,
					  &mapped);
}

static inline u64 unmap_one(u64 iova, const struct batch *batch)
{
	struct iommu_iotlb_gather gather;

	iommu_iotlb_gather_init(&gather);
	gather.queued = batch->queued;
	u64 unmapped = table.iommu.ops->unmap_range(&table.iommu, iova,
						    batch->count * batch->page, &gather);

	if (!iommu_pages_list_empty(&gather.freelist))
		iommu_put_pages_list(&gather.freelist);
	return unmapped;
}

static int generic_map_batch(const struct batch *batch)
{
	u64 iova = batch->iova;

	for (unsigned int i = 0; i < batch->operations; i++, iova += batch->stride) {
		int result = map_one(iova, batch);

		if (result != 0)
			return -result;
	}
	return 0;
}

static int generic_unmap_batch(const struct batch *batch)
{
	u64 iova = batch->iova;

	for (unsigned int i = 0; i < batch->operations; i++, iova += batch->stride)
		if (unmap_one(iova, batch) != batch->count * batch->page)
			return EFAULT;
	return 0;
}

static int generic_cycle_batch(const struct batch *batch)
{
	u64 iova = batch->iova;

	for (unsigned int i = 0; i < batch->operations; i++, iova += batch->stride) {
		int result = map_one(iova, batch);

		if (result != 0)
			return -result;
		if (unmap_one(iova, batch) != batch->count * batch->page)
			return EFAULT;
	}
	return 0;
}

static u64 generic_translate_all(const u64 *iovas, size_t count)
{
	phys_addr_t (*iova_to_phys)(struct iommu_domain *domain, dma_addr_t iova) =
		domain_operations()->iova_to_phys;
	u64 sum = 0;

	for (size_t i = 0; i < count; i++)
		sum += iova_to_phys(&table.iommu.domain, iovas[i]);
	return sum;
}

static int generic_harvest(u64 iova, u64 bytes, struct iova_bitmap *bitmap)
{
	struct iommu_iotlb_gather gather;
	struct iommu_dirty_bitmap dirty = { bitmap, &gather };

	iommu_iotlb_gather_init(&gather);
	return -domain_operations()->read_and_clear_dirty(&table.iommu.domain, iova, bytes, 0,
							  &dirty);
}

static void restrict_sizes(u64 sizes)
{
	table.iommu.domain.pgsize_bitmap &= sizes;
}

const struct operations generic_operations = {
	create,
	map,
	unmap,
	translate,
	geometry,
	destroy,
	generic_map_batch,
	generic_unmap_batch,
	generic_cycle_batch,
	generic_translate_all,
	generic_harvest,
	restrict_sizes,
};
