// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Tables of a device's domain outlive the kernel. Kexec Handover preserves their pages and a description of them; the next kernel
 * checks both, and a new domain takes the tables where they lie, as if it had made them. Goes with table-image.c, which finds all
 * tables. A rehearsal of the tables' part: commands in debugfs call it, and a driver or iommufd would later.
 *
 * this kernel                                the next one
 * "preserve DEVICE": tables, description ──▶ "adopt DEVICE": checks, a domain with these tables, attached
 * "forget"                                   "map IOVA PA BYTES", "unmap IOVA BYTES" in it, "release"
 *
 * One device at a time. From "preserve" on nothing may be mapped or unmapped for it: the next kernel would refuse the tables.
 */
//@ include/linux/generic_pt/iommu.h, before: struct pt_iommu_ops {
#define IOMMU_TABLE_EXCHANGE

//@ include/linux/generic_pt/iommu.h, before: 	 * @set_dirty: Make the iova write dirty
	 * @exchange: Exchange all tables for others of the same format
	 * @iommu_table: Table to manipulate, which no device has
	 * @top: The topmost table; receives the one that it was
	 * @levels: How many levels there are; receives how many they were
	 *
	 * Returns: -EINVAL if a table of this configuration has not so many levels.
	 */
	int (*exchange)(struct pt_iommu *iommu_table, void **top, u8 *levels);

	/**
//@ drivers/iommu/generic_pt/pt_iter.h, before: /**\n * PT_MAKE_LEVELS() - Build an unwound walker
static inline int pt_exchange_top(struct pt_common *common, void **top, u8 *levels)
{
	struct pt_range range = pt_top_range(common);

	if (!*levels || *levels > PT_MAX_TOP_LEVEL + 1 ||
	    (!pt_feature(common, PT_FEAT_DYNAMIC_TOP) && *levels != range.top_level + 1))
		return -EINVAL;
	pt_top_set(common, *top, *levels - 1);
	*top = range.top_table;
	*levels = range.top_level + 1;
	return 0;
}

//@ drivers/iommu/generic_pt/iommu_pt.h, before: static void NS(get_info)
static int NS(exchange)(struct pt_iommu *iommu_table, void **top, u8 *levels)
{
	return pt_exchange_top(common_from_iommu(iommu_table), top, levels);
}

//@ drivers/iommu/generic_pt/iommu_pt.h, before: 	.get_info = NS(get_info),
	.exchange = NS(exchange),
//@ drivers/iommu/iommu-pages.h, before: void iommu_free_pages(void *virt);
void *iommu_restore_pages(phys_addr_t phys);
//@ drivers/iommu/iommu-pages.c, before: static void __iommu_free_desc(struct ioptdesc *iopt)
#include <linux/kexec_handover.h>

/**
 * iommu_restore_pages - Make a page of what another kernel has preserved
 * @phys: physical address of what iommu_alloc_pages_node_sz() gave out in that kernel
 *
 * Returns the virtual address, for iommu_free_pages(), or NULL if nothing was preserved there.
 */
void *iommu_restore_pages(phys_addr_t phys)
{
	struct folio *folio = kho_restore_folio(phys);
	unsigned long pgcnt;

	if (!folio)
		return NULL;
	folio_ioptdesc(folio)->incoherent = false;
	pgcnt = folio_nr_pages(folio);
	mod_node_page_state(folio_pgdat(folio), NR_IOMMU_PAGES, pgcnt);
	lruvec_stat_mod_folio(folio, NR_SECONDARY_PAGETABLE, pgcnt);
	return folio_address(folio);
}

//@ drivers/iommu/iommu.c, at its end

#if IS_ENABLED(CONFIG_KEXEC_HANDOVER) && IS_ENABLED(CONFIG_IOMMU_DEBUGFS)
#include <linux/kexec_handover.h>
#include <linux/memory_hotplug.h>

#include "iommu-pages.h"

/* Name in the tree of what is handed over. */
#define HANDOVER_NAME "iommu-tables"
#define HANDOVER_VERSION 1
/* Bytes of a command. */
#define HANDOVER_COMMAND 80

/* Description of tables, all of it little-endian. */
struct handover {
	u8 magic[8];
	__le32 version;
	/* CRC-32C of all that follows. */
	__le32 digest;
	char format[16];
	__le32 features;
	u8 levels;
	u8 oa_lg2;
	u8 zeroes[2];
	/* CRC-32C of the tables' bytes, in the order in which they are named. */
	__le32 contents;
	__le32 count;
	/* Physical addresses, with the level in their lowest bits; the topmost table comes first. */
	__le64 table[];
} __packed;
static_assert(sizeof(struct handover) == 48);

static const u8 handover_magic[8] = { 'I', 'O', 'P', 'T', 'K', 'H', 'O', '\n' };

/* What this kernel preserves, what it has found, and what it has made of it. */
static DEFINE_MUTEX(handover_lock);
static struct handover *handover_out;
static struct device *handover_out_device;
static struct handover *handover_in;
static size_t handover_in_bytes;
static struct iommu_domain *handover_domain;
static struct iommu_group *handover_group;
/* A description that a test wants to be tried once in the place of what was found. */
static struct handover *handover_tried;
static size_t handover_tried_bytes;

static phys_addr_t handover_table(const struct handover *it, u32 nth)
{
	return le64_to_cpu(it->table[nth]) & PAGE_MASK;
}

static u32 handover_contents(const struct handover *it)
{
	u32 crc = ~0, i;

	for (i = 0; i < le32_to_cpu(it->count); i++) {
		crc = crc32c(crc, phys_to_virt(handover_table(it, i)), SZ_4K);
		cond_resched();
	}
	return ~crc;
}

static u32 handover_digest(const struct handover *it, size_t bytes)
{
	return ~crc32c(~0, it->format, bytes - offsetof(struct handover, format));
}

/* Describes the tables of an image, whose pages KHO is told of. */
static struct handover *handover_describe(const struct pt_image *image)
{
	size_t bytes = struct_size_t(struct handover, table, image->count + 1);
	struct handover *it;
	u32 i;

	it = kho_alloc_preserve(bytes);
	if (IS_ERR(it))
		return it;
	memcpy(it->magic, handover_magic, sizeof(it->magic));
	it->version = cpu_to_le32(HANDOVER_VERSION);
	strscpy(it->format, image->format);
	it->features = cpu_to_le32(image->features);
	it->levels = image->levels;
	it->oa_lg2 = image->oa_lg2;
	it->count = cpu_to_le32(image->count + 1);
	it->table[0] = cpu_to_le64(image->root | (image->levels - 1));
	for (i = 0; i < image->count; i++)
		it->table[i + 1] = cpu_to_le64(image->table[i]);
	it->contents = cpu_to_le32(handover_contents(it));
	it->digest = cpu_to_le32(handover_digest(it, bytes));
	return it;
}

/* A page is held from when KHO knows of it: its domain may free it. */
static int handover_preserve_page(phys_addr_t phys)
{
	struct folio *folio = virt_to_folio(phys_to_virt(phys));
	int error;

	error = kho_preserve_folio(folio);
	if (!error)
		folio_get(folio);
	return error;
}

static void handover_unpreserve_page(phys_addr_t phys)
{
	struct folio *folio = virt_to_folio(phys_to_virt(phys));

	kho_unpreserve_folio(folio);
	folio_put(folio);
}

static void handover_unpreserve(struct handover *it, u32 count)
{
	while (count)
		handover_unpreserve_page(handover_table(it, --count));
	kho_unpreserve_free(it);
}

#ifdef IOMMU_HANDOVER_OF_DMA
static void handover_unkeep(void);
#else
static void handover_unkeep(void)
{
}
#endif

static int handover_preserve(struct device *dev)
{
	struct iommu_group *group = dev->iommu_group;
	struct pt_image image;
	struct handover *it;
	u32 done, count;
	int error;

	if (handover_out)
		return -EBUSY;
	if (!kho_is_enabled())
		return -EOPNOTSUPP;
	if (!group)
		return -ENODEV;
	guard(mutex)(&group->mutex);
	error = image_find(group->domain, &image);
	if (error)
		return error;
	it = handover_describe(&image);
	kvfree(image.table);
	if (IS_ERR(it))
		return PTR_ERR(it);
	count = le32_to_cpu(it->count);
	for (done = 0; done < count; done++) {
		error = handover_preserve_page(handover_table(it, done));
		if (error)
			goto undo;
	}
	error = kho_add_subtree(HANDOVER_NAME, it, struct_size(it, table, count));
	if (error)
		goto undo;
	handover_out = it;
	handover_out_device = get_device(dev);
	dev_info(dev, "%u I/O page tables are preserved, of %s\n", count, it->format);
	return 0;

undo:
	handover_unpreserve(it, done);
	return error;
}

static int handover_forget(void)
{
	if (!handover_out)
		return -ENOENT;
	handover_unkeep();
	kho_remove_subtree(handover_out);
	handover_unpreserve(handover_out, le32_to_cpu(handover_out->count));
	handover_out = NULL;
	put_device(handover_out_device);
	return 0;
}

/* Looks at a description by itself. */
static int handover_check(const struct handover *it, size_t bytes)
{
	if (bytes < sizeof(*it)) {
		pr_err("description of tables: %zu bytes, not %zu and more\n", bytes, sizeof(*it));
		return -ENODATA;
	}
	if (memcmp(it->magic, handover_magic, sizeof(it->magic)) ||
	    le32_to_cpu(it->version) != HANDOVER_VERSION) {
		pr_err("description of tables: version %u, not %u, or another mark\n",
		       le32_to_cpu(it->version), HANDOVER_VERSION);
		return -EPROTONOSUPPORT;
	}
	if (!it->count || bytes != struct_size(it, table, le32_to_cpu(it->count))) {
		pr_err("description of tables: %zu bytes for %u tables\n", bytes,
		       le32_to_cpu(it->count));
		return -ENODATA;
	}
	if (handover_digest(it, bytes) != le32_to_cpu(it->digest)) {
		pr_err("description of tables: digest %#x, not %#x\n",
		       handover_digest(it, bytes), le32_to_cpu(it->digest));
		return -EBADMSG;
	}
	return 0;
}

/* Looks whether a new domain may have tables that are described, and whether these are as they were. */
static int handover_fits(const struct handover *it, const struct pt_image *empty)
{
	phys_addr_t phys;
	u32 i;

	if (strncmp(it->format, empty->format, sizeof(it->format)) ||
	    le32_to_cpu(it->features) != empty->features || it->oa_lg2 != empty->oa_lg2) {
		pr_err("tables of format %.16s, features %#x, %u bits, and not of %s, %#x, %u\n",
		       it->format, le32_to_cpu(it->features), it->oa_lg2, empty->format,
		       empty->features, empty->oa_lg2);
		return -EXDEV;
	}
	for (i = 0; i < le32_to_cpu(it->count); i++) {
		phys = handover_table(it, i);
		if (!pfn_to_online_page(PHYS_PFN(phys))) {
			pr_err("table %u at %pa: no memory is there\n", i, &phys);
			return -EFAULT;
		}
	}
	if (handover_contents(it) != le32_to_cpu(it->contents)) {
		pr_err("tables have changed: digest %#x, not %#x\n", handover_contents(it),
		       le32_to_cpu(it->contents));
		return -ESTALE;
	}
	return 0;
}

/* Looks whether the links of a domain's tables lead to those that are described, and to no others. */
static int handover_compare(struct iommu_domain *domain, const struct handover *it)
{
	u32 count = le32_to_cpu(it->count) - 1;
	struct pt_image image;
	int error;
	u32 i;

	error = image_find(domain, &image);
	if (error)
		return error;
	for (i = 0; i < count && i < image.count; i++)
		if (le64_to_cpu(it->table[i + 1]) != image.table[i])
			break;
	if (i != image.count || i != count) {
		pr_err("links lead to %zu tables, of which %u are among the %u described\n",
		       image.count, i, count);
		error = -ESTALE;
	}
	kvfree(image.table);
	return error;
}

/* Makes pages of this kernel of tables. When it fails, a unit may walk them all the same: none is freed then. */
static int handover_restore(struct pt_iommu *pt, const struct handover *it, bool incoherent)
{
	u32 i, count = le32_to_cpu(it->count);
	void *table;
	int error;

	for (i = 0; i < count; i++) {
		table = iommu_restore_pages(handover_table(it, i));
		error = table ? 0 : -EFAULT;
		if (!error && incoherent)
			error = iommu_pages_start_incoherent(table, pt->iommu_device);
		if (error) {
			pr_err("table %u of %u was not preserved, or cannot be flushed\n", i, count);
			return error;
		}
	}
	return 0;
}

/* Exchanges the tables of a new domain for those that are described. */
static int handover_take(struct iommu_domain *domain, const struct handover *it, size_t bytes)
{
	struct pt_iommu *pt = iommupt_from_domain(domain);
	struct pt_image empty;
	bool incoherent;
	void *top;
	u8 levels;
	int error;

	error = handover_check(it, bytes);
	if (error)
		return error;
	error = image_find(domain, &empty);
	if (error)
		return error;
	kvfree(empty.table);
	/* VFIO and iommufd ask for that, where a unit can. */
	if (le32_to_cpu(it->features) != empty.features && domain->ops->enforce_cache_coherency &&
	    domain->ops->enforce_cache_coherency(domain)) {
		empty = (struct pt_image){};
		pt->ops->image(pt, &empty);
	}
	error = handover_fits(it, &empty);
	if (error)
		return error;
	incoherent = empty.features & BIT(PT_FEAT_DMA_INCOHERENT);
	top = phys_to_virt(handover_table(it, 0));
	levels = it->levels;
	error = pt->ops->exchange(pt, &top, &levels);
	if (error) {
		pr_err("tables of %u levels\n", it->levels);
		return -EXDEV;
	}
	error = handover_compare(domain, it);
	if (!error)
		error = handover_restore(pt, it, incoherent);
	if (error) {
		WARN_ON(pt->ops->exchange(pt, &top, &levels));
		return error;
	}
	/* The root that it had. */
	if (incoherent)
		iommu_pages_free_incoherent(top, pt->iommu_device);
	else
		iommu_free_pages(top);
	return 0;
}

/* The only device of a group gets a domain with the tables in one step, and is kept from drivers and users. */
static int handover_adopt_in(struct iommu_group *group, struct device *dev)
{
	struct handover *tried __free(kvfree) = no_free_ptr(handover_tried);
	const struct handover *it = tried ?: handover_in;
	size_t bytes = tried ? handover_tried_bytes : handover_in_bytes;
	struct iommu_domain *domain;
	int error;

	if (handover_domain)
		return -EBUSY;
	if (!handover_in)
		return -ENOENT;
	guard(mutex)(&group->mutex);
	if (group->owner_cnt || group->domain != group->default_domain ||
	    list_count_nodes(&group->devices) != 1)
		return -EBUSY;
	domain = iommu_paging_domain_alloc(dev);
	if (IS_ERR(domain))
		return PTR_ERR(domain);
	error = handover_take(domain, it, bytes);
	if (error) {
		iommu_domain_free(domain);
		return error;
	}
	/* From here on the tables are this kernel's. */
	kho_restore_free(handover_in);
	handover_in = NULL;
	error = __iommu_attach_group(domain, group);
	if (error) {
		dev_err(dev, "tables of the kernel before, which it may walk, are in no domain: %d\n",
			error);
		return error;
	}
	group->owner = &handover_domain;
	group->owner_cnt = 1;
	handover_domain = domain;
	handover_group = group;
	dev_info(dev, "has the I/O page tables of the kernel before\n");
	return 0;
}

static int handover_adopt(struct device *dev)
{
	struct iommu_group *group = iommu_group_get(dev);
	int error;

	if (!group)
		return -ENODEV;
	error = handover_adopt_in(group, dev);
	if (error)
		iommu_group_put(group);
	return error;
}

static int handover_release(void)
{
	if (!handover_domain)
		return -ENOENT;
	iommu_group_release_dma_owner(handover_group);
	iommu_domain_free(handover_domain);
	iommu_group_put(handover_group);
	handover_domain = NULL;
	return 0;
}

static int handover_map(u64 iova, u64 phys, u64 len)
{
	if (!handover_domain)
		return -ENOENT;
	return iommu_map(handover_domain, iova, phys, len, IOMMU_READ | IOMMU_WRITE, GFP_KERNEL);
}

static int handover_unmap(u64 iova, u64 len)
{
	if (!handover_domain)
		return -ENOENT;
	return iommu_unmap(handover_domain, iova, len) == len ? 0 : -ERANGE;
}

static int handover_device_command(const char *name, int (*command)(struct device *dev))
{
	struct device *dev = bus_find_device_by_name(&pci_bus_type, NULL, name);
	int error;

	if (!dev)
		return -ENODEV;
	error = command(dev);
	put_device(dev);
	return error;
}

static int handover_command(const char *text)
{
	u64 iova, phys, len;
	char name[32];

	guard(mutex)(&handover_lock);
	if (sscanf(text, "preserve %31s", name) == 1)
		return handover_device_command(name, handover_preserve);
	if (sscanf(text, "adopt %31s", name) == 1)
		return handover_device_command(name, handover_adopt);
	if (sscanf(text, "map %llx %llx %llx", &iova, &phys, &len) == 3)
		return handover_map(iova, phys, len);
	if (sscanf(text, "unmap %llx %llx", &iova, &len) == 2)
		return handover_unmap(iova, len);
	if (sysfs_streq(text, "forget"))
		return handover_forget();
	if (sysfs_streq(text, "release"))
		return handover_release();
	return -EINVAL;
}

static ssize_t handover_write(struct file *file, const char __user *from, size_t count, loff_t *at)
{
	char *text;
	int error;

	if (count > HANDOVER_COMMAND)
		return -E2BIG;
	text = memdup_user_nul(from, count);
	if (IS_ERR(text))
		return PTR_ERR(text);
	error = handover_command(text);
	kfree(text);
	return error ?: count;
}

static const struct file_operations handover_operations = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = handover_write,
};

/* The description that was found. One that is written is tried in its place by the next command that adopts. */
static ssize_t description_read(struct file *file, char __user *to, size_t count, loff_t *at)
{
	guard(mutex)(&handover_lock);
	if (!handover_in)
		return 0;
	return simple_read_from_buffer(to, count, at, handover_in, handover_in_bytes);
}

static ssize_t description_write(struct file *file, const char __user *from, size_t count,
				 loff_t *at)
{
	struct handover *it;

	if (count > SZ_4M)
		return -E2BIG;
	it = vmemdup_user(from, count);
	if (IS_ERR(it))
		return PTR_ERR(it);
	guard(mutex)(&handover_lock);
	kvfree(handover_tried);
	handover_tried = it;
	handover_tried_bytes = count;
	return count;
}

static const struct file_operations description_operations = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.read = description_read,
	.write = description_write,
};

static int __init handover_init(void)
{
	struct dentry *directory;
	phys_addr_t phys;

	if (!kho_retrieve_subtree(HANDOVER_NAME, &phys, &handover_in_bytes))
		handover_in = phys_to_virt(phys);
	directory = debugfs_create_dir("handover", iommu_debugfs_dir);
	debugfs_create_file("command", 0200, directory, NULL, &handover_operations);
	debugfs_create_file("description", 0600, directory, NULL, &description_operations);
	return 0;
}
late_initcall(handover_init);
#endif
