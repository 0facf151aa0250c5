// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Kernel's side of src/lib.rs that all formats have in common. */
#include <linux/memblock.h>
#include <linux/mm.h>
#include <linux/module.h>

#include "tables.h"

/* As src/lib.rs has them. */
static_assert(PAGE_SHIFT == 12);
static_assert(sizeof(struct page) == 64);
static_assert(offsetof(struct ioptdesc, iopt_freelist_elm) == 8);
static_assert(sizeof(struct list_head) >= 12);

unsigned long dmaspace_direct __ro_after_init;
unsigned long dmaspace_pages __ro_after_init;
DEFINE_PER_CPU(unsigned long, dmaspace_maps);

#ifndef CONFIG_ARM64
bool dmaspace_one __read_mostly;
module_param_named(one, dmaspace_one, bool, 0444);
MODULE_PARM_DESC(one, "Map and unmap page by page");
#endif

static int count_get(char *text, const struct kernel_param *param)
{
	unsigned long __percpu *count = (unsigned long __percpu *)param->arg;
	unsigned long sum = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		sum += *per_cpu_ptr(count, cpu);
	return sysfs_emit(text, "%lu\n", sum);
}

static const struct kernel_param_ops count_ops = { .get = count_get };
module_param_cb(maps, &count_ops, (void *)&dmaspace_maps, 0444);
MODULE_PARM_DESC(maps, "Ranges that were mapped by iopt");
#ifdef IOMMU_UNMAP_RUNS
DEFINE_PER_CPU(unsigned long, dmaspace_unmaps);
module_param_cb(unmaps, &count_ops, (void *)&dmaspace_unmaps, 0444);
MODULE_PARM_DESC(unmaps, "Unmaps that returned runs");
#endif

/* Before any unit has a table. */
static int __init places(void)
{
	phys_addr_t first = memblock_start_of_DRAM();

	/* Both are linear from the first byte of memory on. */
	dmaspace_direct = (unsigned long)__va(first) - first;
	dmaspace_pages = (unsigned long)pfn_to_page(0);
	return 0;
}
early_initcall(places);

u64 dmaspace_allocate(const struct dmaspace_call *call, u64 bytes)
{
	void *table = iommu_alloc_pages_node_sz(call->node, call->gfp, bytes);

	if (!table)
		return 0;
	/* On x86-64 nothing has to be begun: what is written is flushed. */
	if (IOMMU_PAGES_USE_DMA_API && call->device &&
	    iommu_pages_start_incoherent(table, call->device)) {
		iommu_free_pages(table);
		return 0;
	}
	return virt_to_phys(table);
}

void dmaspace_free(const struct dmaspace_call *call, u64 table)
{
	if (call->device)
		iommu_pages_free_incoherent(__va(table), call->device);
	else
		iommu_free_pages(__va(table));
}

void dmaspace_flush(const struct dmaspace_call *call, void *entries, size_t bytes)
{
	iommu_pages_flush_incoherent(call->device, entries, 0, bytes);
}

void __noreturn dmaspace_panic(void)
{
	panic("dmaspace: Rust panicked");
}

MODULE_LICENSE("Dual MIT/GPL");
