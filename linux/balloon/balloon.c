// SPDX-License-Identifier: MIT OR GPL-2.0-only OR Apache-2.0
/*
 * A virtio balloon (VIRTIO 1.3, 5.5), also by messages in bulk: the kernel's half.
 *
 * The protocol is the Rust crate virtio-balloon (src/lib.rs). Here are the virtio driver, the guest's pages, and
 * when the kernel wants something of the balloon.
 *
 * Pages. A pageblock that is free is taken whole: it fragments nothing, and costs one allocation and one bit. What
 * is smaller may be migrated: it is split into single pages, which mm/balloon.c lists. A block of which only a part
 * leaves the balloon becomes such pages first. So a page of the balloon is in a block whose bit is set in @blocks,
 * or on the list, or isolated from it for migration, during which it cannot leave.
 *
 * Locks. @lock is held whenever the driver is called. It is taken by work items, by reports of free pages and by the
 * OOM notifier; migration and the shrinker, which an allocation under it may end in, only try. No allocation under
 * it invokes the OOM killer, whose notifier waits for the lock: ours are __GFP_NORETRY, and a transport's may use
 * reserves. When memory is short, @urgent makes an inflate end and release the lock.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/balloon.h>
#include <linux/bitmap.h>
#include <linux/delay.h>
#include <linux/io.h>
#include <linux/ktime.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/oom.h>
#include <linux/page_reporting.h>
#include <linux/pageblock-flags.h>
#include <linux/poison.h>
#include <linux/scatterlist.h>
#include <linux/sched/mm.h>
#include <linux/shrinker.h>
#include <linux/slab.h>
#include <linux/swap.h>
#include <linux/virtio.h>
#include <linux/virtio_balloon.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>
#include <linux/vmstat.h>
#include <linux/workqueue.h>

#include "balloon.h"

#define BLOCK_PAGES (1UL << pageblock_order)
/* So many pages are dequeued at once, with interrupts disabled. */
#define BATCH 512
/* Elements of a buffer: those of a report. */
#define ELEMENTS PAGE_REPORTING_CAPACITY
/* A device that is gone is noticed so soon. */
#define SLICE (HZ / 10 ?: 1)
/* When there was nothing to take, or nothing that may leave. */
#define PAUSE (HZ / 5 ?: 1)
/* No attempt of an allocation may kill, or use reserves. */
#define TAKE_FLAGS (__GFP_NOMEMALLOC | __GFP_NORETRY | __GFP_NOWARN)
#define OWN_FLAGS (GFP_KERNEL | __GFP_ZERO | __GFP_NORETRY | __GFP_NOWARN)

enum queue {
	INFLATE,
	DEFLATE,
	STATS,
	FREE_PAGE,
	REPORTING,
	QUEUES
};

struct balloon {
	struct virtio_device *device;
	struct mutex lock;
	/* The driver in Rust, once it is made. */
	void *driver;

	/* Negotiated queues by number, without gaps. */
	struct virtqueue *queues[QUEUES];
	unsigned int queue_count;
	/* A bit for each queue: it was notified of. */
	unsigned long used;
	wait_queue_head_t answered;
	atomic_t generation;
	/* A buffer on its way, and a report: too large for the stack. With the lock. */
	struct scatterlist elements[ELEMENTS];
	struct dmaspace_run reported[ELEMENTS];

	/* Pages that may be migrated. */
	struct balloon_dev_info pages;
	/* A page that the device knows from a migration that it did not end. */
	struct page *stray;
	/* The pages that may be in the balloon, from a pageblock's first on. */
	unsigned long first, end;
	/* A bit for each pageblock that was taken whole, and for those of them that are in the balloon. */
	unsigned long *blocks, *held;

	struct delayed_work follow;
	struct work_struct stats, hint;
	/* No work is queued any more. */
	spinlock_t stop_lock;
	bool stopped;

	/* How many wait for the lock since memory is short. */
	atomic_t urgent;
	struct notifier_block out_of_memory;
	struct shrinker *shrinker;
	/* Pages that were hinted. */
	unsigned long hinted;
	struct page_reporting_dev_info reporting;

	/* Since the module was loaded; see the attributes. */
	u64 messages, answer_ns, follow_ns, errors;
};

static int bulk_bit = 23;
module_param(bulk_bit, int, 0444);
MODULE_PARM_DESC(bulk_bit, "Feature bit of messages in bulk; -1: page numbers only");

static struct balloon *of_device(struct device *device)
{
	return dev_to_virtio(device)->priv;
}

/* The device. */

static bool has(struct balloon *balloon, unsigned int feature)
{
	return virtio_has_feature(balloon->device, feature);
}

static void queue_used(struct virtqueue *queue)
{
	struct balloon *balloon = queue->vdev->priv;

	set_bit(queue->index, &balloon->used);
	wake_up(&balloon->answered);
}

static void stats_wanted(struct virtqueue *queue)
{
	struct balloon *balloon = queue->vdev->priv;
	unsigned long flags;

	spin_lock_irqsave(&balloon->stop_lock, flags);
	if (!balloon->stopped)
		queue_work(system_freezable_wq, &balloon->stats);
	spin_unlock_irqrestore(&balloon->stop_lock, flags);
}

static void config_changed(struct virtio_device *device)
{
	struct balloon *balloon = device->priv;
	unsigned long flags;

	atomic_inc(&balloon->generation);
	spin_lock_irqsave(&balloon->stop_lock, flags);
	if (!balloon->stopped) {
		mod_delayed_work(system_freezable_wq, &balloon->follow, 0);
		if (has(balloon, VIRTIO_BALLOON_F_FREE_PAGE_HINT))
			queue_work(system_freezable_wq, &balloon->hint);
	}
	spin_unlock_irqrestore(&balloon->stop_lock, flags);
}

int dmaspace_reset(struct balloon *balloon)
{
	/* Before the queues were set up the device knows nothing of ours. */
	if (!balloon->queue_count)
		return 0;
	virtio_reset_device(balloon->device);
	balloon->device->config->del_vqs(balloon->device);
	balloon->queue_count = 0;
	return 0;
}

u64 dmaspace_features(struct balloon *balloon)
{
	return balloon->device->features;
}

/* The virtio core has negotiated what validate() left, so that there is nothing to choose any more. */
int dmaspace_accept(struct balloon *balloon, u64 features)
{
	static const struct {
		const char *name;
		vq_callback_t *callback;
		int feature;
	} queues[QUEUES] = {
		[INFLATE] = { "inflate", queue_used, -1 },
		[DEFLATE] = { "deflate", queue_used, -1 },
		[STATS] = { "stats", stats_wanted, VIRTIO_BALLOON_F_STATS_VQ },
		[FREE_PAGE] = { "free_page", queue_used, VIRTIO_BALLOON_F_FREE_PAGE_HINT },
		[REPORTING] = { "reporting", queue_used, VIRTIO_BALLOON_F_REPORTING },
	};
	struct virtqueue_info infos[QUEUES] = {};
	u64 ours = GENMASK_ULL(VIRTIO_BALLOON_F_REPORTING, 0);
	unsigned int count = 0;
	int error;

	if (bulk_bit >= 0)
		ours |= BIT_ULL(bulk_bit);
	if ((features ^ balloon->device->features) & ours)
		return 0;
	for (unsigned int i = 0; i < QUEUES; i++) {
		if (queues[i].feature >= 0 && !has(balloon, queues[i].feature))
			continue;
		infos[count].name = queues[i].name;
		infos[count].callback = queues[i].callback;
		count++;
	}
	error = virtio_find_vqs(balloon->device, count, balloon->queues, infos, NULL);
	if (error)
		return error;
	balloon->queue_count = count;
	return 1;
}

void dmaspace_begin(struct balloon *balloon)
{
	virtio_device_ready(balloon->device);
}

bool dmaspace_broken(struct balloon *balloon)
{
	return !balloon->queue_count || virtqueue_is_broken(balloon->queues[INFLATE]);
}

/*
 * Field by field, of four bytes each: a transport may know accesses of no other length (VIRTIO 1.3, 4.1.3.1). It may
 * allocate a message for each.
 */
static void read_config(struct virtio_device *device, u16 offset, u8 *bytes, size_t count)
{
	unsigned int flags = memalloc_noreclaim_save();

	for (size_t at = 0; at + sizeof(u32) <= count; at += sizeof(u32))
		device->config->get(device, offset + at, bytes + at, sizeof(u32));
	memalloc_noreclaim_restore(flags);
}

void dmaspace_read_config(struct balloon *balloon, u16 offset, u8 *bytes, size_t count)
{
	read_config(balloon->device, offset, bytes, count);
}

void dmaspace_write_config(struct balloon *balloon, u16 offset, u32 value)
{
	unsigned int flags = memalloc_noreclaim_save();
	__le32 field = cpu_to_le32(value);

	balloon->device->config->set(balloon->device, offset, &field, sizeof(field));
	memalloc_noreclaim_restore(flags);
}

u32 dmaspace_generation(struct balloon *balloon)
{
	return atomic_read(&balloon->generation);
}

u16 dmaspace_queue_size(struct balloon *balloon, u16 queue)
{
	if (queue >= balloon->queue_count)
		return 0;
	return virtqueue_get_vring_size(balloon->queues[queue]);
}

int dmaspace_offer(struct balloon *balloon, u16 queue, const struct dmaspace_run *runs,
		   size_t count, bool write)
{
	struct scatterlist *list = balloon->elements;
	struct virtqueue *to;
	int error;

	if (queue >= balloon->queue_count || !count || count > ELEMENTS)
		return -EINVAL;
	to = balloon->queues[queue];
	sg_init_table(list, count);
	for (size_t i = 0; i < count; i++)
		sg_set_page(&list[i], pfn_to_page(PHYS_PFN(runs[i].address)), runs[i].bytes,
			    offset_in_page(runs[i].address));
	clear_bit(queue, &balloon->used);
	error = write ? virtqueue_add_inbuf(to, list, count, balloon, GFP_NOWAIT) :
			virtqueue_add_outbuf(to, list, count, balloon, GFP_NOWAIT);
	if (error)
		return error;
	if (queue <= DEFLATE) {
		balloon->messages++;
		balloon->answer_ns -= ktime_get_ns();
	}
	return virtqueue_kick(to) ? 0 : -ENODEV;
}

bool dmaspace_answered(struct balloon *balloon, u16 queue)
{
	unsigned int bytes;

	if (queue >= balloon->queue_count || !virtqueue_get_buf(balloon->queues[queue], &bytes))
		return false;
	if (queue <= DEFLATE)
		balloon->answer_ns += ktime_get_ns();
	return true;
}

int dmaspace_wait(struct balloon *balloon, u16 queue, u64 ns)
{
	unsigned long ticks = min_t(u64, nsecs_to_jiffies64(ns) + 1, SLICE);

	wait_event_timeout(balloon->answered, test_and_clear_bit(queue, &balloon->used), ticks);
	return dmaspace_broken(balloon) ? -ENODEV : 0;
}

u64 dmaspace_now(void)
{
	return ktime_get_ns();
}

void dmaspace_pause(u64 ns)
{
	msleep(div_u64(ns, NSEC_PER_MSEC) + 1);
}

/* Memory for the driver's own use. */

void *dmaspace_allocate(size_t bytes)
{
	return kvmalloc(bytes, OWN_FLAGS);
}

void dmaspace_free(void *memory, size_t bytes)
{
	kvfree(memory);
}

u64 dmaspace_allocate_shared(size_t bytes)
{
	void *memory = alloc_pages_exact(bytes, OWN_FLAGS);

	return memory ? virt_to_phys(memory) : 0;
}

void dmaspace_free_shared(u64 address, size_t bytes)
{
	free_pages_exact(phys_to_virt(address), bytes);
}

void *dmaspace_pointer(u64 address)
{
	return phys_to_virt(address);
}

/* The guest's pages. */

u32 dmaspace_page_shift(void)
{
	return PAGE_SHIFT;
}

u64 dmaspace_block(void)
{
	return PFN_PHYS(BLOCK_PAGES);
}

void dmaspace_span(struct balloon *balloon, struct dmaspace_run *span)
{
	span->address = PFN_PHYS(balloon->first);
	span->bytes = PFN_PHYS(balloon->end - balloon->first);
}

static unsigned long block_of(struct balloon *balloon, unsigned long pfn)
{
	return (pfn - balloon->first) / BLOCK_PAGES;
}

/* The block of the pages from @pfn on, if they are all of one that was taken whole. */
static bool whole(struct balloon *balloon, unsigned long pfn, unsigned long count,
		  unsigned long *block)
{
	*block = block_of(balloon, pfn);
	return IS_ALIGNED(pfn, BLOCK_PAGES) && count >= BLOCK_PAGES &&
	       test_bit(*block, balloon->blocks);
}

/* Single pages of a block that is not compound, into the balloon's list. */
static void list_pages(struct balloon *balloon, struct page *first, unsigned long count)
{
	LIST_HEAD(pages);

	for (unsigned long i = 0; i < count; i++)
		list_add_tail(&first[i].lru, &pages);
	balloon_page_list_enqueue(&balloon->pages, &pages);
}

bool dmaspace_take(struct balloon *balloon, u64 bytes, u64 *address)
{
	unsigned int order = get_order(bytes);
	bool single = order < pageblock_order;
	gfp_t flags = GFP_HIGHUSER;
	struct page *page;
	unsigned long pfn;

	if (order > pageblock_order || atomic_read(&balloon->urgent))
		return false;
	if (single && IS_ENABLED(CONFIG_BALLOON_MIGRATION))
		flags = GFP_HIGHUSER_MOVABLE;
	/* A larger block is taken if there is one: nothing is reclaimed or compacted for it. */
	if (order)
		flags &= ~__GFP_RECLAIM;
	page = alloc_pages(flags | TAKE_FLAGS, order);
	if (!page)
		return false;
	pfn = page_to_pfn(page);
	/* Memory that was added later. */
	if (pfn < balloon->first || pfn + (1UL << order) > balloon->end) {
		__free_pages(page, order);
		return false;
	}
	if (single) {
		if (order)
			split_page(page, order);
		list_pages(balloon, page, 1UL << order);
	} else {
		set_bit(block_of(balloon, pfn), balloon->blocks);
	}
	*address = PFN_PHYS(pfn);
	return true;
}

void dmaspace_give_back(struct balloon *balloon, u64 address, u64 bytes)
{
	unsigned long pfn = PHYS_PFN(address), end = pfn + PHYS_PFN(bytes), block;

	while (pfn < end) {
		if (whole(balloon, pfn, end - pfn, &block)) {
			clear_bit(block, balloon->blocks);
			__free_pages(pfn_to_page(pfn), pageblock_order);
			pfn += BLOCK_PAGES;
		} else {
			put_page(pfn_to_page(pfn++));
		}
	}
	cond_resched();
}

/* Counts as in mm/balloon.c for the pages of its list. */
static void count_block(struct balloon *balloon, struct page *page, bool held, bool managed)
{
	long pages = held ? BLOCK_PAGES : -BLOCK_PAGES;

	count_vm_events(held ? BALLOON_INFLATE : BALLOON_DEFLATE, BLOCK_PAGES);
	mod_node_page_state(page_pgdat(page), NR_BALLOON_PAGES, pages);
	if (managed)
		adjust_managed_page_count(page, -pages);
}

void dmaspace_counted(struct balloon *balloon, u64 address, u64 bytes, bool held, bool managed)
{
	unsigned long pfn = PHYS_PFN(address), end = pfn + PHYS_PFN(bytes), block;

	while (pfn < end) {
		if (whole(balloon, pfn, end - pfn, &block)) {
			assign_bit(block, balloon->held, held);
			count_block(balloon, pfn_to_page(pfn), held, managed);
		}
		pfn = min(end, ALIGN(pfn + 1, BLOCK_PAGES));
	}
}

/* Hands over pages that were dequeued; those that the driver does not want go back. False: it wants no more. */
static bool hand_over(struct balloon *balloon, struct list_head *pages,
		      bool (*leaves)(void *context, u64 address, u64 bytes), void *context)
{
	struct page *page, *next;
	LIST_HEAD(unwanted);
	unsigned long pfn = 0, count = 0;

	list_for_each_entry_safe(page, next, pages, lru) {
		unsigned long at = page_to_pfn(page);

		list_del(&page->lru);
		if (!list_empty(&unwanted)) {
			list_add(&page->lru, &unwanted);
			continue;
		}
		/* Neighbours, in either direction, within a block. */
		if (count && block_of(balloon, at) == block_of(balloon, pfn)) {
			if (at == pfn + count) {
				count++;
				continue;
			}
			if (at + 1 == pfn) {
				pfn = at;
				count++;
				continue;
			}
		}
		if (count && !leaves(context, PFN_PHYS(pfn), PFN_PHYS(count))) {
			for (unsigned long i = 0; i < count; i++)
				list_add(&pfn_to_page(pfn + i)->lru, &unwanted);
			list_add(&page->lru, &unwanted);
			count = 0;
			continue;
		}
		pfn = at;
		count = 1;
	}
	if (count && !leaves(context, PFN_PHYS(pfn), PFN_PHYS(count)))
		for (unsigned long i = 0; i < count; i++)
			list_add(&pfn_to_page(pfn + i)->lru, &unwanted);
	if (list_empty(&unwanted))
		return true;
	balloon_page_list_enqueue(&balloon->pages, &unwanted);
	return false;
}

void dmaspace_choose(struct balloon *balloon, u64 bytes,
		     bool (*leaves)(void *context, u64 address, u64 bytes), void *context)
{
	unsigned long wanted = min(PHYS_PFN(bytes), balloon->end - balloon->first);
	unsigned long count = block_of(balloon, balloon->end);
	unsigned long block = 0;

	/* It leaves when the device was reset. */
	if (balloon->stray && !balloon->queue_count) {
		leaves(context, page_to_phys(balloon->stray), PAGE_SIZE);
		balloon->stray = NULL;
	}
	while (wanted) {
		unsigned long pfn, dequeued;
		LIST_HEAD(pages);

		/* Single pages first: the fewer are held, the less there is to migrate. */
		dequeued = balloon_page_list_dequeue(&balloon->pages, &pages,
						     min(wanted, BATCH));
		if (dequeued) {
			if (!hand_over(balloon, &pages, leaves, context))
				return;
			wanted -= dequeued;
			cond_resched();
			continue;
		}
		block = find_next_bit(balloon->held, count, block);
		if (block >= count)
			return;
		pfn = balloon->first + block * BLOCK_PAGES;
		if (wanted >= BLOCK_PAGES) {
			if (!leaves(context, PFN_PHYS(pfn), PFN_PHYS(BLOCK_PAGES)))
				return;
			wanted -= BLOCK_PAGES;
		} else {
			clear_bit(block, balloon->held);
			clear_bit(block, balloon->blocks);
			count_block(balloon, pfn_to_page(pfn), false,
				    balloon->pages.adjust_managed_page_count);
			split_page(pfn_to_page(pfn), pageblock_order);
			list_pages(balloon, pfn_to_page(pfn), BLOCK_PAGES);
		}
		block++;
	}
}

void dmaspace_stay(struct balloon *balloon, u64 address, u64 bytes)
{
	unsigned long pfn = PHYS_PFN(address), end = pfn + PHYS_PFN(bytes), block;

	while (pfn < end) {
		if (whole(balloon, pfn, end - pfn, &block))
			pfn += BLOCK_PAGES;
		else
			list_pages(balloon, pfn_to_page(pfn++), 1);
	}
}

static void set_stat(u64 *values, u32 *known, unsigned int tag, u64 value)
{
	values[tag] = value;
	*known |= BIT(tag);
}

u32 dmaspace_stats(struct balloon *balloon, u64 *values)
{
	struct sysinfo info;
	u32 known = 0;

#ifdef CONFIG_VM_EVENT_COUNTERS
	unsigned long *events = kmalloc_array(NR_VM_EVENT_ITEMS, sizeof(*events),
					      GFP_KERNEL | __GFP_NORETRY | __GFP_NOWARN);

	if (events) {
		u64 stalls = 0;

		all_vm_events(events);
		for (int zone = 0; zone < MAX_NR_ZONES; zone++)
			stalls += events[ALLOCSTALL_NORMAL - ZONE_NORMAL + zone];
		set_stat(values, &known, VIRTIO_BALLOON_S_SWAP_IN, PFN_PHYS(events[PSWPIN]));
		set_stat(values, &known, VIRTIO_BALLOON_S_SWAP_OUT, PFN_PHYS(events[PSWPOUT]));
		set_stat(values, &known, VIRTIO_BALLOON_S_MAJFLT, events[PGMAJFAULT]);
		set_stat(values, &known, VIRTIO_BALLOON_S_MINFLT, events[PGFAULT]);
		set_stat(values, &known, VIRTIO_BALLOON_S_OOM_KILL, events[OOM_KILL]);
		set_stat(values, &known, VIRTIO_BALLOON_S_ALLOC_STALL, stalls);
#ifdef CONFIG_HUGETLB_PAGE
		set_stat(values, &known, VIRTIO_BALLOON_S_HTLB_PGALLOC,
			 events[HTLB_BUDDY_PGALLOC]);
		set_stat(values, &known, VIRTIO_BALLOON_S_HTLB_PGFAIL,
			 events[HTLB_BUDDY_PGALLOC_FAIL]);
#endif
		kfree(events);
	}
#endif
	set_stat(values, &known, VIRTIO_BALLOON_S_ASYNC_SCAN,
		 PFN_PHYS(global_node_page_state(PGSCAN_KSWAPD)));
	set_stat(values, &known, VIRTIO_BALLOON_S_DIRECT_SCAN,
		 PFN_PHYS(global_node_page_state(PGSCAN_DIRECT)));
	set_stat(values, &known, VIRTIO_BALLOON_S_ASYNC_RECLAIM,
		 PFN_PHYS(global_node_page_state(PGSTEAL_KSWAPD)));
	set_stat(values, &known, VIRTIO_BALLOON_S_DIRECT_RECLAIM,
		 PFN_PHYS(global_node_page_state(PGSTEAL_DIRECT)));
	si_meminfo(&info);
	set_stat(values, &known, VIRTIO_BALLOON_S_MEMFREE, PFN_PHYS(info.freeram));
	set_stat(values, &known, VIRTIO_BALLOON_S_MEMTOT, PFN_PHYS(info.totalram));
	set_stat(values, &known, VIRTIO_BALLOON_S_AVAIL, PFN_PHYS(si_mem_available()));
	set_stat(values, &known, VIRTIO_BALLOON_S_CACHES,
		 PFN_PHYS(global_node_page_state(NR_FILE_PAGES)));
	return known;
}

void dmaspace_error(struct balloon *balloon, const u8 *text, size_t bytes)
{
	balloon->errors++;
	dev_err_ratelimited(&balloon->device->dev, "%.*s\n", (int)bytes, text);
}

void dmaspace_panic(void)
{
	panic(KBUILD_MODNAME ": the driver in Rust panicked\n");
}

/* Work for the kernel and the device. */

static void follow(struct work_struct *work)
{
	struct balloon *balloon = container_of(work, struct balloon, follow.work);
	unsigned long flags;
	int result;
	u64 begun;

	mutex_lock(&balloon->lock);
	begun = ktime_get_ns();
	result = dmaspace_balloon_follow(balloon->driver);
	balloon->follow_ns += ktime_get_ns() - begun;
	mutex_unlock(&balloon->lock);
	if (result != DMASPACE_STARVED && result != -EAGAIN)
		return;
	spin_lock_irqsave(&balloon->stop_lock, flags);
	if (!balloon->stopped)
		queue_delayed_work(system_freezable_wq, &balloon->follow, PAUSE);
	spin_unlock_irqrestore(&balloon->stop_lock, flags);
}

static void stats(struct work_struct *work)
{
	struct balloon *balloon = container_of(work, struct balloon, stats);

	mutex_lock(&balloon->lock);
	/* The device may ask before the driver has begun, or although it could not. */
	if (balloon->driver)
		dmaspace_balloon_stats(balloon->driver);
	mutex_unlock(&balloon->lock);
}

static void hint(struct work_struct *work)
{
	struct balloon *balloon = container_of(work, struct balloon, hint);

	mutex_lock(&balloon->lock);
	dmaspace_balloon_hint(balloon->driver);
	WRITE_ONCE(balloon->hinted, (bitmap_weight(balloon->blocks, block_of(balloon, balloon->end)) -
				     bitmap_weight(balloon->held, block_of(balloon, balloon->end))) *
				    BLOCK_PAGES);
	mutex_unlock(&balloon->lock);
}

/* Pages. With the lock. */
static unsigned long give_back_hinted(struct balloon *balloon, unsigned long pages)
{
	u64 bytes = dmaspace_balloon_give_back_hinted(balloon->driver,
						      PFN_PHYS(ALIGN(pages, BLOCK_PAGES)));

	WRITE_ONCE(balloon->hinted, balloon->hinted - PHYS_PFN(bytes));
	return PHYS_PFN(bytes);
}

static unsigned long shrinker_count(struct shrinker *shrinker, struct shrink_control *control)
{
	struct balloon *balloon = shrinker->private_data;

	return READ_ONCE(balloon->hinted) ?: SHRINK_EMPTY;
}

static unsigned long shrinker_scan(struct shrinker *shrinker, struct shrink_control *control)
{
	struct balloon *balloon = shrinker->private_data;
	unsigned long pages;

	if (!mutex_trylock(&balloon->lock))
		return SHRINK_STOP;
	pages = give_back_hinted(balloon, control->nr_to_scan);
	mutex_unlock(&balloon->lock);
	return pages;
}

/* Not for ever: a driver that is set up anew holds the lock and waits for memory. */
static bool lock_urgently(struct balloon *balloon)
{
	unsigned long deadline = jiffies + 10 * HZ;
	bool locked;

	atomic_inc(&balloon->urgent);
	while (!(locked = mutex_trylock(&balloon->lock)) && time_before(jiffies, deadline))
		msleep(1);
	atomic_dec(&balloon->urgent);
	return locked;
}

static int memory_is_short(struct notifier_block *block, unsigned long unused, void *freed)
{
	struct balloon *balloon = container_of(block, struct balloon, out_of_memory);
	unsigned long pages;
	s64 bytes;

	if (!lock_urgently(balloon))
		return NOTIFY_OK;
	/* Pages that were only hinted cost the host nothing. */
	pages = give_back_hinted(balloon, balloon->hinted);
	if (!pages) {
		bytes = dmaspace_balloon_out_of_memory(balloon->driver);
		if (bytes > 0)
			pages = PHYS_PFN(bytes);
	}
	mutex_unlock(&balloon->lock);
	*(unsigned long *)freed += pages;
	return NOTIFY_OK;
}

static int report(struct page_reporting_dev_info *info, struct scatterlist *list,
		  unsigned int count)
{
	struct balloon *balloon = container_of(info, struct balloon, reporting);
	struct dmaspace_run *runs = balloon->reported;
	struct scatterlist *entry;
	unsigned int i;
	int error;

	if (count > ELEMENTS)
		return -EINVAL;
	mutex_lock(&balloon->lock);
	for_each_sg(list, entry, count, i) {
		runs[i].address = page_to_phys(sg_page(entry));
		runs[i].bytes = entry->length;
	}
	error = dmaspace_balloon_report(balloon->driver, runs, count);
	mutex_unlock(&balloon->lock);
	return error;
}

static int migrate(struct balloon_dev_info *pages, struct page *to, struct page *from,
		   enum migrate_mode mode)
{
	struct balloon *balloon = container_of(pages, struct balloon, pages);
	int error;

	/* An allocation of ours may have led here. */
	if (!mutex_trylock(&balloon->lock))
		return -EAGAIN;
	error = dmaspace_balloon_migrate(balloon->driver, page_to_phys(from), page_to_phys(to));
	if (error && error != -EAGAIN) {
		/* The device may have been told of both. It answers no message after this one. */
		get_page(to);
		balloon->stray = to;
	}
	mutex_unlock(&balloon->lock);
	return error ? -EAGAIN : 0;
}

static void stop_listening(struct balloon *balloon)
{
	if (balloon->out_of_memory.notifier_call)
		unregister_oom_notifier(&balloon->out_of_memory);
	if (balloon->shrinker)
		shrinker_free(balloon->shrinker);
}

static int listen(struct balloon *balloon)
{
	bool hints = has(balloon, VIRTIO_BALLOON_F_FREE_PAGE_HINT);
	int error = 0;

	if (hints) {
		balloon->shrinker = shrinker_alloc(0, KBUILD_MODNAME);
		if (!balloon->shrinker)
			return -ENOMEM;
		balloon->shrinker->count_objects = shrinker_count;
		balloon->shrinker->scan_objects = shrinker_scan;
		balloon->shrinker->private_data = balloon;
		shrinker_register(balloon->shrinker);
	}
	if (hints || has(balloon, VIRTIO_BALLOON_F_DEFLATE_ON_OOM)) {
		balloon->out_of_memory.notifier_call = memory_is_short;
		/* It fails for no reason but what all notifiers share: there is one of this address. */
		error = register_oom_notifier(&balloon->out_of_memory);
		if (error)
			balloon->out_of_memory.notifier_call = NULL;
	}
	if (!error && has(balloon, VIRTIO_BALLOON_F_REPORTING)) {
		unsigned int last = balloon->queue_count - 1;

		balloon->reporting.report = report;
		balloon->reporting.order = PAGE_REPORTING_ORDER_UNSPECIFIED;
		balloon->reporting.capacity =
			min(virtqueue_get_vring_size(balloon->queues[last]), ELEMENTS);
		/* There may be another one: the kernel has place for one. */
		error = page_reporting_register(&balloon->reporting);
	}
	if (error)
		stop_listening(balloon);
	return error;
}

/* No work is done any more. */
static void stop(struct balloon *balloon)
{
	unsigned long flags;

	spin_lock_irqsave(&balloon->stop_lock, flags);
	balloon->stopped = true;
	spin_unlock_irqrestore(&balloon->stop_lock, flags);
	cancel_delayed_work_sync(&balloon->follow);
	cancel_work_sync(&balloon->stats);
	cancel_work_sync(&balloon->hint);
}

/* The device gets no page any more, and the guest has all of them. Waits for pages that are being migrated. */
static int freeze_driver(struct balloon *balloon)
{
	int error;

	do {
		mutex_lock(&balloon->lock);
		error = dmaspace_balloon_freeze(balloon->driver);
		balloon->hinted = 0;
		mutex_unlock(&balloon->lock);
		if (error == -EAGAIN)
			msleep(1);
	} while (error == -EAGAIN);
	return error;
}

/* The virtio driver. */

/* Pattern of free pages, if they have one. */
static bool poisons(u32 *value)
{
	if (want_init_on_free())
		*value = 0;
	else if (page_poisoning_enabled_static())
		memset(value, PAGE_POISON, sizeof(*value));
	else
		return false;
	return true;
}

static int validate(struct virtio_device *device)
{
	u8 config[DMASPACE_CONFIG_BYTES];
	u32 value;

	if (!device->config->get)
		return -EINVAL;
	/* 5.5.6.7.1: what is reported comes back as it was only if the device knows the value. */
	if (!poisons(&value))
		__virtio_clear_bit(device, VIRTIO_BALLOON_F_PAGE_POISON);
	else if (!virtio_has_feature(device, VIRTIO_BALLOON_F_PAGE_POISON))
		__virtio_clear_bit(device, VIRTIO_BALLOON_F_REPORTING);
	if (bulk_bit >= 0 && virtio_has_feature(device, bulk_bit)) {
		read_config(device, 0, config, sizeof(config));
		if (!dmaspace_balloon_takes_bulk(config))
			__virtio_clear_bit(device, bulk_bit);
	}
	/* A table for a buffer would be allocated while free pages are reported; addresses are physical. */
	__virtio_clear_bit(device, VIRTIO_RING_F_INDIRECT_DESC);
	__virtio_clear_bit(device, VIRTIO_F_ACCESS_PLATFORM);
	return 0;
}

/* All memory that there is now. */
static int find_pages(struct balloon *balloon)
{
	unsigned long first = ULONG_MAX, end = 0, longs;
	int node;

	for_each_online_node(node) {
		first = min(first, node_start_pfn(node));
		end = max(end, node_end_pfn(node));
	}
	balloon->first = ALIGN_DOWN(first, BLOCK_PAGES);
	balloon->end = ALIGN(end, BLOCK_PAGES);
	longs = BITS_TO_LONGS(block_of(balloon, balloon->end));
	balloon->blocks = kvcalloc(2 * longs, sizeof(long), GFP_KERNEL);
	if (!balloon->blocks)
		return -ENOMEM;
	balloon->held = balloon->blocks + longs;
	return 0;
}

static void free_balloon(struct balloon *balloon)
{
	balloon->device->priv = NULL;
	if (balloon->driver)
		dmaspace_balloon_drop(balloon->driver);
	kvfree(balloon->driver);
	kvfree(balloon->blocks);
	kfree(balloon);
}

static int probe(struct virtio_device *device)
{
	struct balloon *balloon = kzalloc(sizeof(*balloon), GFP_KERNEL);
	void *driver;
	s64 poison = -1;
	u32 value;
	int error;

	if (!balloon)
		return -ENOMEM;
	balloon->device = device;
	device->priv = balloon;
	mutex_init(&balloon->lock);
	spin_lock_init(&balloon->stop_lock);
	init_waitqueue_head(&balloon->answered);
	INIT_DELAYED_WORK(&balloon->follow, follow);
	INIT_WORK(&balloon->stats, stats);
	INIT_WORK(&balloon->hint, hint);
	balloon_devinfo_init(&balloon->pages);
	balloon->pages.adjust_managed_page_count = !has(balloon, VIRTIO_BALLOON_F_DEFLATE_ON_OOM);
#ifdef CONFIG_BALLOON_MIGRATION
	balloon->pages.migratepage = migrate;
#endif
	if (poisons(&value))
		poison = value;
	error = find_pages(balloon);
	if (error)
		goto no_driver;
	driver = kvzalloc(dmaspace_balloon_size(), GFP_KERNEL);
	if (!driver) {
		error = -ENOMEM;
		goto no_driver;
	}
	mutex_lock(&balloon->lock);
	error = dmaspace_balloon_new(driver, balloon, bulk_bit, poison);
	if (!error)
		balloon->driver = driver;
	mutex_unlock(&balloon->lock);
	if (error) {
		kvfree(driver);
		goto no_driver;
	}
	error = listen(balloon);
	if (error)
		goto no_listening;
	/* The device may have wanted something before there was a driver. */
	config_changed(device);
	return 0;

no_listening:
	freeze_driver(balloon);
no_driver:
	stop(balloon);
	free_balloon(balloon);
	return error;
}

static void remove(struct virtio_device *device)
{
	struct balloon *balloon = device->priv;

	if (has(balloon, VIRTIO_BALLOON_F_REPORTING))
		page_reporting_unregister(&balloon->reporting);
	stop_listening(balloon);
	stop(balloon);
	freeze_driver(balloon);
	free_balloon(balloon);
}

static int __maybe_unused freeze(struct virtio_device *device)
{
	/* The work queue is frozen; what else calls finds the driver frozen. */
	return freeze_driver(device->priv);
}

static int __maybe_unused restore(struct virtio_device *device)
{
	struct balloon *balloon = device->priv;
	int error;

	mutex_lock(&balloon->lock);
	error = dmaspace_balloon_restore(balloon->driver);
	mutex_unlock(&balloon->lock);
	if (!error)
		config_changed(device);
	return error;
}

/* Since the module was loaded. Bytes in the balloon; messages, nanoseconds until they were answered, and of all
 * inflating and deflating; errors. */
#define COUNTER(name, value)									\
static ssize_t name##_show(struct device *device, struct device_attribute *attribute,		\
			   char *text)								\
{												\
	struct balloon *balloon = of_device(device);						\
	u64 counter;										\
												\
	mutex_lock(&balloon->lock);								\
	counter = value;									\
	mutex_unlock(&balloon->lock);								\
	return sysfs_emit(text, "%llu\n", counter);						\
}												\
static DEVICE_ATTR_RO(name)

COUNTER(held_bytes, dmaspace_balloon_held(balloon->driver));
COUNTER(messages, balloon->messages);
COUNTER(answer_ns, balloon->answer_ns);
COUNTER(follow_ns, balloon->follow_ns);
COUNTER(errors, balloon->errors);

static struct attribute *balloon_attrs[] = {
	&dev_attr_held_bytes.attr, &dev_attr_messages.attr, &dev_attr_answer_ns.attr,
	&dev_attr_follow_ns.attr,  &dev_attr_errors.attr,   NULL,
};
ATTRIBUTE_GROUPS(balloon);

static const struct virtio_device_id devices[] = {
	{ VIRTIO_ID_BALLOON, VIRTIO_DEV_ANY_ID },
	{ 0 },
};
MODULE_DEVICE_TABLE(virtio, devices);

static unsigned int features[] = {
	VIRTIO_BALLOON_F_MUST_TELL_HOST,
	VIRTIO_BALLOON_F_STATS_VQ,
	VIRTIO_BALLOON_F_DEFLATE_ON_OOM,
	VIRTIO_BALLOON_F_FREE_PAGE_HINT,
	VIRTIO_BALLOON_F_PAGE_POISON,
	VIRTIO_BALLOON_F_REPORTING,
	/* Messages in bulk: bulk_bit. */
	0,
};

static struct virtio_driver driver = {
	.driver.name = KBUILD_MODNAME,
	.driver.dev_groups = balloon_groups,
	.id_table = devices,
	.feature_table = features,
	.feature_table_size = ARRAY_SIZE(features),
	.validate = validate,
	.probe = probe,
	.remove = remove,
	.config_changed = config_changed,
#ifdef CONFIG_PM_SLEEP
	.freeze = freeze,
	.restore = restore,
#endif
};

static int __init balloon_init(void)
{
	if (bulk_bit < 0) {
		driver.feature_table_size--;
	} else if (dmaspace_balloon_bit_is_free(bulk_bit)) {
		features[ARRAY_SIZE(features) - 1] = bulk_bit;
	} else {
		pr_err("bit %d has another meaning, or belongs to no device\n", bulk_bit);
		return -EINVAL;
	}
	return register_virtio_driver(&driver);
}
module_init(balloon_init);

static void __exit balloon_exit(void)
{
	unregister_virtio_driver(&driver);
}
module_exit(balloon_exit);

MODULE_DESCRIPTION("Virtio balloon, also by messages in bulk");
MODULE_AUTHOR("The dmaspace authors");
MODULE_LICENSE("Dual MIT/GPL");
