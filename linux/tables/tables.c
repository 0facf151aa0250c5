// SPDX-License-Identifier: GPL-2.0 OR MIT
/* What all formats have in common of the kernel's side of src/lib.rs. */
#include <linux/generic_pt/iommu.h>
#include <linux/mm.h>
#include <linux/module.h>

#include "../../iommu-pages.h"
#include "../tables.h"

/* As src/lib.rs has them. */
static_assert(IS_ENABLED(CONFIG_X86_64));
static_assert(sizeof(struct page) == 64);
static_assert(offsetof(struct ioptdesc, iopt_freelist_elm) == 8);
static_assert(sizeof(struct list_head) >= 12);

unsigned long dmaspace_direct __ro_after_init;
unsigned long dmaspace_pages __ro_after_init;
DEFINE_PER_CPU(unsigned long, dmaspace_maps);

bool dmaspace_one __read_mostly;
module_param_named(one, dmaspace_one, bool, 0444);
MODULE_PARM_DESC(one, "Map and unmap page by page");

static int maps_get(char *text, const struct kernel_param *param)
{
	unsigned long maps = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		maps += per_cpu(dmaspace_maps, cpu);
	return sysfs_emit(text, "%lu\n", maps);
}

static const struct kernel_param_ops maps_ops = { .get = maps_get };
module_param_cb(maps, &maps_ops, NULL, 0444);
MODULE_PARM_DESC(maps, "Ranges that were mapped by iopt");

/* Before any unit has a table. */
static int __init places(void)
{
	dmaspace_direct = (unsigned long)__va(0);
	dmaspace_pages = (unsigned long)pfn_to_page(0);
	return 0;
}
early_initcall(places);

u64 dmaspace_allocate(struct pt_iommu *iommu, gfp_t gfp)
{
	void *table = iommu_alloc_pages_node_sz(iommu->nid, gfp, PAGE_SIZE);

	return table ? virt_to_phys(table) : 0;
}

void dmaspace_free(struct pt_iommu *iommu, u64 table)
{
	iommu_free_pages(__va(table));
}

void dmaspace_flush(struct pt_iommu *iommu, void *entries, size_t bytes)
{
	iommu_pages_flush_incoherent(iommu->iommu_device, entries, 0, bytes);
}

void __noreturn dmaspace_panic(void)
{
	panic("dmaspace: Rust panicked");
}

MODULE_LICENSE("Dual MIT/GPL");
