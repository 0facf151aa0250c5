/* SPDX-License-Identifier: MIT OR GPL-2.0-only OR Apache-2.0 */
/*
 * Between the kernel (balloon.c) and the driver (src/lib.rs, on the crate virtio-balloon).
 *
 * Addresses are the guest's physical addresses, lengths are bytes. A negative result is an error number.
 * Everything but dmaspace_balloon_takes_bulk is called with the balloon's lock held, or before anything
 * else can know the balloon.
 */
#ifndef DMASPACE_BALLOON_H
#define DMASPACE_BALLOON_H

#include <linux/types.h>

struct balloon;

struct dmaspace_run {
	u64 address;
	u64 bytes;
};

/* Results of an inflate. */
#define DMASPACE_REACHED 0
#define DMASPACE_STARVED 1

/* Bytes of the configuration space that say which messages in bulk the device takes. */
#define DMASPACE_CONFIG_BYTES 24

/* The driver, for the kernel. */
bool dmaspace_balloon_bit_is_free(int bulk_bit);
bool dmaspace_balloon_takes_bulk(const u8 config[DMASPACE_CONFIG_BYTES]);
size_t dmaspace_balloon_size(void);
int dmaspace_balloon_new(void *driver, struct balloon *balloon, int bulk_bit, s64 poison);
void dmaspace_balloon_drop(void *driver);
int dmaspace_balloon_restore(void *driver);
int dmaspace_balloon_freeze(void *driver);
int dmaspace_balloon_follow(void *driver);
s64 dmaspace_balloon_out_of_memory(void *driver);
int dmaspace_balloon_migrate(void *driver, u64 old, u64 new);
int dmaspace_balloon_stats(void *driver);
int dmaspace_balloon_hint(void *driver);
u64 dmaspace_balloon_give_back_hinted(void *driver, u64 bytes);
int dmaspace_balloon_report(void *driver, const struct dmaspace_run *runs, size_t count);
u64 dmaspace_balloon_held(const void *driver);

/* The kernel, for the driver: the device. */
int dmaspace_reset(struct balloon *balloon);
u64 dmaspace_features(struct balloon *balloon);
int dmaspace_accept(struct balloon *balloon, u64 features);
void dmaspace_begin(struct balloon *balloon);
bool dmaspace_broken(struct balloon *balloon);
void dmaspace_read_config(struct balloon *balloon, u16 offset, u8 *bytes, size_t count);
void dmaspace_write_config(struct balloon *balloon, u16 offset, u32 value);
u32 dmaspace_generation(struct balloon *balloon);
u16 dmaspace_queue_size(struct balloon *balloon, u16 queue);
int dmaspace_offer(struct balloon *balloon, u16 queue, const struct dmaspace_run *runs,
		   size_t count, bool write);
bool dmaspace_answered(struct balloon *balloon, u16 queue);
int dmaspace_wait(struct balloon *balloon, u16 queue, u64 ns);
u64 dmaspace_now(void);
void dmaspace_pause(u64 ns);

/* Memory for the driver's own use. */
void *dmaspace_allocate(size_t bytes);
void dmaspace_free(void *memory, size_t bytes);
u64 dmaspace_allocate_shared(size_t bytes);
void dmaspace_free_shared(u64 address, size_t bytes);
void *dmaspace_pointer(u64 address);

/* The guest's pages. */
u32 dmaspace_page_shift(void);
u64 dmaspace_block(void);
void dmaspace_span(struct balloon *balloon, struct dmaspace_run *span);
bool dmaspace_take(struct balloon *balloon, u64 bytes, u64 *address);
void dmaspace_give_back(struct balloon *balloon, u64 address, u64 bytes);
void dmaspace_choose(struct balloon *balloon, u64 bytes,
		     bool (*leaves)(void *context, u64 address, u64 bytes), void *context);
void dmaspace_stay(struct balloon *balloon, u64 address, u64 bytes);
void dmaspace_counted(struct balloon *balloon, u64 address, u64 bytes, bool held, bool managed);
u32 dmaspace_stats(struct balloon *balloon, u64 *values);

void dmaspace_error(struct balloon *balloon, const u8 *text, size_t bytes);
void dmaspace_panic(void) __noreturn;

#endif
