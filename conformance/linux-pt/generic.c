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
	if (config.format == AMD_V1_GROWING)
		bits |= BIT(PT_FEAT_DYNAMIC_TOP);
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

static u64 translate(u64 iova)
{
	struct iommu_domain *domain = &table.iommu.domain;

	switch (config.format) {
	case AMD_V1:
		return plain_amdv1_iova_to_phys(domain, iova);
	case AMD_V1_GROWING:
		return pt_iommu_amdv1_iova_to_phys(domain, iova);
	case X86_64:
		return pt_iommu_x86_64_iova_to_phys(domain, iova);
	case VTD_SS:
		return pt_iommu_vtdss_iova_to_phys(domain, iova);
	default:
		return pt_iommu_riscv_64_iova_to_phys(domain, iova);
	}
}

/* Where a unit is told to begin, as each format's driver learns it. */
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

const struct operations generic_operations = {
	create, map, unmap, translate, geometry, destroy,
};
