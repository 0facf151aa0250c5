// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * I/O page tables of a device in debugfs, for every format of generic_pt: an image with all tables, their addresses and entries,
 * which describes itself. `dmaspace tables` reads it; crates/iopt/src/image/mod.rs says what is where.
 */
//@ drivers/iommu/Kconfig, before: 	help\n	  Allows exposure of IOMMU device internals.
	select CRC32
//@ include/linux/generic_pt/iommu.h, before: struct pt_iommu_ops {
#define IOMMU_TABLE_IMAGE

/**
 * struct pt_image - tables of a domain
 * @format: the format's name
 * @root: physical address of the topmost one
 * @levels: how many levels there are
 * @oa_lg2: bits of an output address
 * @va_lg2: bits of an input address
 * @sign_extend: input addresses repeat their highest bit
 * @features: features of generic_pt that it has
 * @table: all others: a physical address, with the level in its lowest bits
 * @count: how many of these there are
 * @room: how many of them @table has room for
 */
struct pt_image {
	const char *format;
	phys_addr_t root;
	u8 levels;
	u8 oa_lg2;
	u8 va_lg2;
	bool sign_extend;
	unsigned int features;
	u64 *table;
	size_t count;
	size_t room;
};

//@ include/linux/generic_pt/iommu.h, before: 	 * @set_dirty: Make the iova write dirty
	 * @image: Find all tables
	 * @iommu_table: Table to read
	 * @image: Receives them, as many as it has room for; counts them all
	 *
	 * Context: The caller holds off operations that free tables.
	 */
	void (*image)(struct pt_iommu *iommu_table, struct pt_image *image);

	/**
//@ drivers/iommu/generic_pt/pt_iter.h, before: /**\n * PT_MAKE_LEVELS() - Build an unwound walker
static inline int __pt_image_tables(struct pt_range *range, void *arg, unsigned int level,
				    struct pt_table_p *table)
{
	struct pt_state pts = pt_init(range, level, table);
	phys_addr_t here = virt_to_phys(table);
	struct pt_image *image = arg;

	if (here != image->root) {
		if (image->count < image->room)
			image->table[image->count] = here | level;
		image->count++;
	}
	for_each_pt_level_entry(&pts)
		if (pts.type == PT_ENTRY_TABLE && pfn_valid(PHYS_PFN(pt_table_pa(&pts))))
			pt_descend(&pts, arg, __pt_image_tables);
	return 0;
}

/* Fills in what is said of the tables, and finds them. */
static inline void pt_image_tables(struct pt_common *common, struct pt_image *image)
{
	struct pt_range range = pt_top_range(common);

	image->format = __stringify(PTPFX_RAW);
	image->root = virt_to_phys(range.top_table);
	image->levels = range.top_level + 1;
	image->oa_lg2 = common->max_oasz_lg2;
	image->va_lg2 = range.max_vasz_lg2;
	image->sign_extend = pt_feature(common, PT_FEAT_SIGN_EXTEND);
	image->features = common->features;
	pt_walk_range(&range, __pt_image_tables, image);
	if (!image->sign_extend)
		return;
	range = pt_upper_range(common);
	pt_walk_range(&range, __pt_image_tables, image);
}

//@ drivers/iommu/generic_pt/iommu_pt.h, before: static void NS(get_info)
static void NS(image)(struct pt_iommu *iommu_table, struct pt_image *image)
{
	pt_image_tables(common_from_iommu(iommu_table), image);
}

//@ drivers/iommu/generic_pt/iommu_pt.h, before: 	.get_info = NS(get_info),
	.image = NS(image),
//@ drivers/iommu/iommu.c, at its end

#ifdef CONFIG_IOMMU_DEBUGFS
#include <linux/crc32c.h>
#include <linux/debugfs.h>
#include <linux/delay.h>
#include <linux/mem_encrypt.h>
#include <linux/sched/signal.h>
#include <linux/sort.h>

/* Header of an image, all of it little-endian. */
struct image_header {
	u8 magic[8];
	__le32 version;
	__le32 bytes;
	__le64 total;
	__le16 format;
	u8 configuration[6];
	u8 levels;
	u8 entry_bytes;
	u8 oa_lg2;
	u8 va_lg2;
	u8 above;
	u8 encryption;
	u8 zeroes[2];
	__le64 sizes;
	__le64 root;
	__le32 root_bytes;
	__le32 table_bytes;
	__le64 tables;
	u8 more_zeroes[8];
} __packed;
static_assert(sizeof(struct image_header) == 80);

/* Before the entries of each table but the root. */
struct image_table {
	__le64 phys;
	u8 level;
	u8 zeroes[7];
} __packed;

struct image_file {
	size_t len;
	u8 bytes[];
};

static struct dentry *image_directory;

static u16 image_format(const char *name)
{
	static const char *const names[] = { "amdv1", "x86_64", "vtdss" };
	int nth = match_string(names, ARRAY_SIZE(names), name);

	if (nth >= 0)
		return nth + 1;
	return strcmp(name, "riscv_64") ? 0 : 7;
}

static int image_order(const void *one, const void *other)
{
	return cmp_int(*(const u64 *)one, *(const u64 *)other);
}

static struct image_file *image_write(const struct pt_image *image, u64 sizes)
{
	size_t len = sizeof(struct image_header) + SZ_4K + sizeof(__le32) +
		     image->count * (sizeof(struct image_table) + SZ_4K);
	struct image_file *file;
	u8 *at;
	size_t i;

	if (len > INT_MAX - sizeof(*file))
		return ERR_PTR(-EFBIG);
	file = kvmalloc(struct_size(file, bytes, len), GFP_KERNEL);
	if (!file)
		return ERR_PTR(-ENOMEM);
	file->len = len;
	at = file->bytes;
	*(struct image_header *)at = (struct image_header){
		.magic = { 'I', 'O', 'P', 'T', 'I', 'M', 'G', '\n' },
		.version = cpu_to_le32(1),
		.bytes = cpu_to_le32(sizeof(struct image_header)),
		.total = cpu_to_le64(len),
		.format = cpu_to_le16(image_format(image->format)),
		.levels = image->levels,
		.entry_bytes = 8,
		.oa_lg2 = image->oa_lg2,
		.va_lg2 = image->va_lg2,
		.above = image->sign_extend ? 2 : 0,
		/* Those of a table that has not grown yet. */
		.sizes = cpu_to_le64(sizes & GENMASK_U64(image->va_lg2 - 1, 0)),
		.root = cpu_to_le64(image->root),
		.root_bytes = cpu_to_le32(SZ_4K),
		.table_bytes = cpu_to_le32(SZ_4K),
		.tables = cpu_to_le64(image->count),
	};
	at += sizeof(struct image_header);
	memcpy(at, phys_to_virt(image->root), SZ_4K);
	at += SZ_4K;
	for (i = 0; i < image->count; i++) {
		phys_addr_t phys = image->table[i] & ~(u64)(SZ_4K - 1);

		*(struct image_table *)at = (struct image_table){
			.phys = cpu_to_le64(phys),
			.level = image->table[i] & (SZ_4K - 1),
		};
		at += sizeof(struct image_table);
		memcpy(at, phys_to_virt(phys), SZ_4K);
		at += SZ_4K;
	}
	*(__le32 *)at = cpu_to_le32(~crc32c(~0, file->bytes, at - file->bytes));
	return file;
}

/* Finds all tables of a domain but the topmost, in the order of their addresses; image->table is the caller's to free. */
static int image_find(struct iommu_domain *domain, struct pt_image *image)
{
	struct pt_iommu *pt = domain ? iommupt_from_domain(domain) : NULL;

	*image = (struct pt_image){};
	/* Links do not have SME's bit. */
	if (!pt || !pt->ops->image || __sme_set(0ULL))
		return -EOPNOTSUPP;
	pt->ops->image(pt, image);
	image->room = image->count;
	image->count = 0;
	image->table = kvmalloc_array(image->room, sizeof(*image->table), GFP_KERNEL);
	if (image->room && !image->table)
		return -ENOMEM;
	pt->ops->image(pt, image);
	if (image->count > image->room) {
		kvfree(image->table);
		return -EAGAIN;
	}
	sort(image->table, image->count, sizeof(*image->table), image_order, NULL);
	return 0;
}

/*
 * The domain's tables, as they are now. A table that its user frees meanwhile is read as it is then, as with Intel's file: it is
 * for domains whose users map and unmap nothing, and change no sizes, for that long.
 */
static struct image_file *image_of(struct iommu_domain *domain)
{
	struct image_file *file = ERR_PTR(-EOPNOTSUPP);
	struct pt_image image;
	int error;

	error = image_find(domain, &image);
	if (error)
		return ERR_PTR(error);
	if (image_format(image.format))
		file = image_write(&image, domain->pgsize_bitmap);
	kvfree(image.table);
	return file;
}

static int image_open(struct inode *inode, struct file *opened)
{
	struct device *dev = inode->i_private;
	struct iommu_group *group = iommu_group_get(dev);
	struct image_file *file;

	if (!group)
		return -ENODEV;
	/* Nothing is attached meanwhile. Who removes the file holds the lock, and waits for opens of it. */
	if (!mutex_trylock(&group->mutex)) {
		iommu_group_put(group);
		msleep(5);
		return restart_syscall();
	}
	file = image_of(group->domain);
	mutex_unlock(&group->mutex);
	iommu_group_put(group);
	if (IS_ERR(file))
		return PTR_ERR(file);
	opened->private_data = file;
	return 0;
}

static ssize_t image_read(struct file *opened, char __user *to, size_t count, loff_t *at)
{
	struct image_file *file = opened->private_data;

	return simple_read_from_buffer(to, count, at, file->bytes, file->len);
}

static int image_release(struct inode *inode, struct file *opened)
{
	kvfree(opened->private_data);
	return 0;
}

static const struct file_operations image_operations = {
	.owner = THIS_MODULE,
	.open = image_open,
	.read = image_read,
	.llseek = default_llseek,
	.release = image_release,
};

static void image_add(struct device *dev)
{
	if (!image_directory)
		image_directory = debugfs_create_dir("tables", iommu_debugfs_dir);
	debugfs_create_file(dev_name(dev), 0400, image_directory, dev, &image_operations);
}

static void image_remove(struct device *dev)
{
	/* Without a directory this would look in that of debugfs. */
	if (image_directory)
		debugfs_lookup_and_remove(dev_name(dev), image_directory);
}
#else
static void image_add(struct device *dev)
{
}

static void image_remove(struct device *dev)
{
}
#endif
//@ drivers/iommu/iommu.c, before: static struct group_device *iommu_group_alloc_device(struct iommu_group *group,\n						     struct device *dev);
static void image_add(struct device *dev);
static void image_remove(struct device *dev);
//@ drivers/iommu/iommu.c, before: 	/*\n	 * The gdev must be in the list before calling
	image_add(dev);
//@ drivers/iommu/iommu.c, before: 	sysfs_remove_link(group->devices_kobj, grp_dev->name);\n	sysfs_remove_link(&dev->kobj, "iommu_group");\n\n	trace_remove
	image_remove(dev);
