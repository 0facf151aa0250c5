// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * A device goes on with its DMA while one kernel takes the place of another: VT-d in legacy mode. Goes after kexec.c. "keep", after
 * "preserve", preserves the root and context tables of the device's unit as well; the device's bus mastering and the unit's
 * translation stay on, if nothing has changed at the kexec; the next kernel copies the device's context entry, as it does with all
 * entries after a crash, and "adopt" changes the domain's number in it by one store.
 */
//@ include/linux/iommu.h, before: extern size_t iommu_unmap(struct iommu_domain *domain, unsigned long iova,
#if IS_ENABLED(CONFIG_KEXEC_HANDOVER) && IS_ENABLED(CONFIG_IOMMU_DEBUGFS) && \
	IS_ENABLED(CONFIG_INTEL_IOMMU)
#define IOMMU_HANDOVER_OF_DMA

bool iommu_handover_keeps(struct device *dev);
bool iommu_handover_kept(phys_addr_t root);
bool iommu_handover_kept_device(u8 bus, u8 devfn);
extern int intel_iommu_enabled;

void intel_iommu_keep(struct device *dev);
int intel_iommu_context_tables(struct device *dev, __le64 *table, unsigned int room);
#else
static inline bool iommu_handover_keeps(struct device *dev)
{
	return false;
}

static inline bool iommu_handover_kept(phys_addr_t root)
{
	return false;
}

static inline bool iommu_handover_kept_device(u8 bus, u8 devfn)
{
	return false;
}
#endif

//@ drivers/pci/pci-driver.c, before: 	/*\n	 * If this is a kexec reboot, turn off Bus Master bit on the
	if (kexec_in_progress && iommu_handover_keeps(dev))
		return;
//@ drivers/iommu/intel/iommu.c, before: static void intel_disable_iommus(void)
/* Its translation stays on: a device does DMA until the next kernel has it. */
static struct intel_iommu *kept_iommu;

//@ drivers/iommu/intel/iommu.c, before: 		/* Disable PMRs explicitly here. */
		if (iommu == kept_iommu)
			continue;

//@ drivers/iommu/intel/iommu.c, before: 		if (!context_present(&ce))\n			continue;\n\n		did = context_domain_id(&ce);
		/* Tables of other devices are not preserved. */
		if (iommu_handover_kept(0) && !iommu_handover_kept_device(bus, devfn))
			continue;

//@ drivers/iommu/intel/iommu.c, before: 		if (translation_pre_enabled(iommu) && !is_kdump_kernel()) {
		if (!iommu_handover_kept(readq(iommu->reg + DMAR_RTADDR_REG) & VTD_PAGE_MASK))
//@ drivers/iommu/intel/iommu.c, before: 	return translation_pre_enabled(info->iommu) && !info->domain;
	if (iommu_handover_kept(0))
		return !info->domain && context_copied(info->iommu, info->bus, info->devfn);
//@ drivers/iommu/intel/iommu.c, before: 	copied_context_tear_down(iommu, context, bus, devfn);\n	context_clear_entry(context);\n	context_set_domain_id(context, did);
	if (info && info->ats_supported)
		translation = CONTEXT_TT_DEV_IOTLB;
	/* The device has these tables already. It is never without. */
	if (iommu_handover_kept(0) && context_copied(iommu, bus, devfn) &&
	    context->lo == (pt_info.ssptptr | translation << 2 | 1) &&
	    (context->hi & 7) == pt_info.aw) {
		u16 old = context_domain_id(context);

		WRITE_ONCE(context->hi, (context->hi & ~(0xffffULL << 8)) | (u64)did << 8);
		__iommu_flush_cache(iommu, context, sizeof(*context));
		iommu_flush_write_buffer(iommu);
		iommu->flush.flush_context(iommu, old, PCI_DEVID(bus, devfn),
					   DMA_CCMD_MASK_NOBIT, DMA_CCMD_DEVICE_INVL);
		iommu->flush.flush_iotlb(iommu, old, 0, 0, DMA_TLB_DSI_FLUSH);
		clear_context_copied(iommu, bus, devfn);
		ida_free(&iommu->domain_ida, old);
		goto out_unlock;
	}
//@ drivers/iommu/intel/iommu.c, at its end

#ifdef IOMMU_HANDOVER_OF_DMA
/* At a kexec: the unit's root and context tables are all preserved, and it stays on. */
void intel_iommu_keep(struct device *dev)
{
	struct device_domain_info *info = dev_iommu_priv_get(dev);

	kept_iommu = info->iommu;
}

/* Physical addresses of the root and the context tables of a device's unit, and how many there are. */
int intel_iommu_context_tables(struct device *dev, __le64 *table, unsigned int room)
{
	struct device_domain_info *info;
	struct intel_iommu *iommu;
	unsigned int bus, count = 0;

	if (!dev->iommu || dev->iommu->iommu_dev->ops != &intel_iommu_ops)
		return -EOPNOTSUPP;
	info = dev_iommu_priv_get(dev);
	iommu = info->iommu;
	if (sm_supported(iommu))
		return -EOPNOTSUPP;
	guard(spinlock)(&iommu->lock);
	table[count++] = cpu_to_le64(virt_to_phys(iommu->root_entry));
	for (bus = 0; bus < ROOT_ENTRY_NR; bus++) {
		if (!(iommu->root_entry[bus].lo & 1))
			continue;
		if (count == room)
			return -E2BIG;
		table[count++] = cpu_to_le64(iommu->root_entry[bus].lo & VTD_PAGE_MASK);
	}
	return count;
}
#endif
//@ drivers/iommu/iommu.c, at its end

#ifdef IOMMU_HANDOVER_OF_DMA
#include <linux/kexec.h>

#define HANDOVER_UNIT "iommu-contexts"

/* A unit that stays on, for one device: the root comes first, then the context tables. A page. */
struct handover_unit {
	__le32 count;
	u8 bus;
	u8 devfn;
	u8 zeroes[2];
	__le64 table[];
};
#define HANDOVER_UNIT_ROOM ((PAGE_SIZE - sizeof(struct handover_unit)) / sizeof(__le64))

static struct handover_unit *handover_unit;

static phys_addr_t handover_unit_table(const struct handover_unit *it, u32 nth)
{
	return le64_to_cpu(it->table[nth]);
}

/* What the kernel before has left: nothing changes it. */
static const struct handover_unit *handover_unit_found(void)
{
	phys_addr_t phys;

	return kho_retrieve_subtree(HANDOVER_UNIT, &phys, NULL) ? NULL : phys_to_virt(phys);
}

/* True if the kernel before has left a unit on, with this root, if one is given. */
bool iommu_handover_kept(phys_addr_t root)
{
	const struct handover_unit *it = handover_unit_found();

	return it && (!root || root == handover_unit_table(it, 0));
}

bool iommu_handover_kept_device(u8 bus, u8 devfn)
{
	const struct handover_unit *it = handover_unit_found();

	return it && it->bus == bus && it->devfn == devfn;
}

/* Tables, root and context tables are those that were preserved, and the device has them. */
static bool handover_is_unchanged(void)
{
	struct handover_unit *now;
	struct pt_image image;
	bool same;
	int count;

	now = (void *)get_zeroed_page(GFP_KERNEL);
	if (!now)
		return false;
	count = intel_iommu_context_tables(handover_out_device, now->table, HANDOVER_UNIT_ROOM);
	same = count == le32_to_cpu(handover_unit->count) &&
	       !memcmp(now->table, handover_unit->table, count * sizeof(*now->table)) &&
	       handover_contents(handover_out) == le32_to_cpu(handover_out->contents);
	free_page((unsigned long)now);
	scoped_guard(mutex, &handover_out_device->iommu_group->mutex)
		same = same && !image_find(handover_out_device->iommu_group->domain, &image);
	if (!same)
		return false;
	kvfree(image.table);
	return image.root == handover_table(handover_out, 0);
}

/*
 * True if this device, or one behind it, is to do DMA until the next kernel has it: it was preserved with its unit, nothing has
 * changed since, and the next kernel will hear of it.
 */
bool iommu_handover_keeps(struct device *dev)
{
	static bool keeps, asked;
	struct device *below;

	guard(mutex)(&handover_lock);
	if (!handover_unit || !kexec_image || !kexec_image->kho.fdt)
		return false;
	for (below = handover_out_device; below && below != dev; below = below->parent)
		;
	if (!below)
		return false;
	if (!asked) {
		asked = true;
		keeps = handover_is_unchanged();
		if (keeps)
			intel_iommu_keep(handover_out_device);
		else
			dev_err(handover_out_device, "no DMA: tables have changed since they were preserved\n");
	}
	return keeps;
}

static void handover_unit_unpreserve(struct handover_unit *it, u32 count)
{
	while (count)
		handover_unpreserve_page(handover_unit_table(it, --count));
	kho_unpreserve_free(it);
}

static void handover_unkeep(void)
{
	if (!handover_unit)
		return;
	kho_remove_subtree(handover_unit);
	handover_unit_unpreserve(handover_unit, le32_to_cpu(handover_unit->count));
	handover_unit = NULL;
}

static int count_alias(struct pci_dev *dev, u16 alias, void *count)
{
	++*(unsigned int *)count;
	return 0;
}

static int handover_keep(void)
{
	unsigned int aliases = 0;
	struct handover_unit *it;
	struct pci_dev *pci;
	int count, error;
	u32 done = 0;

	if (!handover_out)
		return -ENOENT;
	if (handover_unit)
		return -EBUSY;
	pci = to_pci_dev(handover_out_device);
	pci_for_each_dma_alias(pci, count_alias, &aliases);
	/* Messages would go by a table that is not preserved. */
	if (aliases != 1 || pci->msi_enabled || pci->msix_enabled)
		return -EOPNOTSUPP;
	it = kho_alloc_preserve(PAGE_SIZE);
	if (IS_ERR(it))
		return PTR_ERR(it);
	it->bus = pci->bus->number;
	it->devfn = pci->devfn;
	count = intel_iommu_context_tables(&pci->dev, it->table, HANDOVER_UNIT_ROOM);
	if (count < 0) {
		kho_unpreserve_free(it);
		return count;
	}
	it->count = cpu_to_le32(count);
	for (error = 0; done < count && !error; done += !error)
		error = handover_preserve_page(handover_unit_table(it, done));
	if (!error)
		error = kho_add_subtree(HANDOVER_UNIT, it, PAGE_SIZE);
	if (error)
		handover_unit_unpreserve(it, done);
	else
		handover_unit = it;
	return error;
}

static ssize_t keep_write(struct file *file, const char __user *from, size_t count, loff_t *at)
{
	guard(mutex)(&handover_lock);
	return handover_keep() ?: count;
}

static const struct file_operations keep_operations = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = keep_write,
};

/* The unit has copies of the root and context tables of the kernel before, which are freed. Otherwise it may walk them still. */
static int __init handover_keep_init(void)
{
	struct dentry *directory = debugfs_lookup("handover", iommu_debugfs_dir);
	const struct handover_unit *it = handover_unit_found();
	u32 i;

	debugfs_create_file("keep", 0200, directory, NULL, &keep_operations);
	dput(directory);
	if (!it || !intel_iommu_enabled)
		return 0;
	for (i = 0; i < le32_to_cpu(it->count); i++)
		kho_restore_free(phys_to_virt(handover_unit_table(it, i)));
	return 0;
}
late_initcall_sync(handover_keep_init);
#endif
