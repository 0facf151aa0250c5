/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Linux's table code behind a pipe: one table at a time.
 *
 * A request is eight words of 64 bits, in the machine's order: a number and seven arguments. The
 * answer is three words and more: the result, the number of complaints (WARN_ON) on the way, the
 * number of words that follow, and these.
 */
#include "pool.h"
#include "table.h"
#include "timing.h"

#include <stdio.h>

/* The numbers and the arguments are those of src/server.rs. */
enum request {
	/* format, options, input bits, output bits, levels, page sizes, base address of tables.
	   An errno; the sizes of pages. */
	CREATE,
	/* iova, address, bytes, permissions. An errno. */
	MAP,
	/* iova, bytes. The bytes that were unmapped. */
	UNMAP,
	/* iova. The address, or 0. */
	TRANSLATE,
	/* Levels or 0, number of roots, roots; then each block of memory: address, bytes, number of
	   words that are not 0, and index and value of each of them. */
	DUMP,
	/* Pages of memory that were not given back. */
	DESTROY,
	/* kind of work, bytes of a page, pages, flags, batches (timing.h). An errno; for each
	   batch the thousandth parts of nanoseconds of one operation. */
	TIME,
};

static u64 *payload;
static size_t payload_words, payload_room;

static void put(u64 word)
{
	if (payload_words == payload_room) {
		payload_room = payload_room * 2 + 1024;
		payload = realloc(payload, payload_room * sizeof *payload);
		if (payload == NULL)
			exit(2);
	}
	payload[payload_words++] = word;
}

static void put_block(size_t page, size_t pages, bool narrow)
{
	const char *block = shim_pool + page * PAGE_SIZE;
	size_t words = pages * PAGE_SIZE / (narrow ? sizeof(u32) : sizeof(u64));

	put(virt_to_phys(block));
	put(pages * PAGE_SIZE);
	size_t count = payload_words;

	put(0);
	for (size_t i = 0; i < words; i++) {
		u64 word = narrow ? ((const u32 *)block)[i] : ((const u64 *)block)[i];

		if (word != 0) {
			put(i);
			put(word);
			payload[count]++;
		}
	}
}

static u64 taken(void)
{
	u64 pages = 0;

	for (size_t page = 0; page < pool_end(); page++)
		pages += pool_note(page)->taken;
	return pages;
}

static void dump(const struct operations *operations, bool narrow)
{
	struct geometry geometry;

	operations->geometry(&geometry);
	put(geometry.levels);
	put(geometry.roots);
	for (unsigned int i = 0; i < geometry.roots; i++)
		put(geometry.root[i]);
	for (size_t page = 0; page < pool_end(); page++)
		if (pool_note(page)->pages != 0)
			put_block(page, pool_note(page)->pages, narrow);
}

int main(void)
{
	const struct operations *operations = NULL;
	struct config config;
	bool narrow = false;
	u64 request[8];

	while (fread(request, sizeof request, 1, stdin) == 1) {
		const u64 *argument = request + 1;
		u64 result = 0;

		payload_words = 0;
		if (request[0] == CREATE) {
			struct geometry geometry;
			u64 options = argument[1];

			config = (struct config){
				argument[0], argument[1], argument[2],
				argument[3], argument[4], argument[5],
			};
			narrow = config.format == ARM_SHORT;
			operations = config.format < ARM_S1 ? &generic_operations :
							      &pgtable_operations;
			pool_reset(argument[6], !(options & RECYCLED)    ? POOL_LOWEST :
						(options & HUGE_MEMORY) ? POOL_RECYCLED_HUGE :
									  POOL_RECYCLED);
			result = operations->create(&config);
			if (result == 0) {
				operations->geometry(&geometry);
				put(geometry.page_sizes);
			} else {
				operations = NULL;
			}
		} else if (operations == NULL) {
			return 1;
		} else if (request[0] == MAP) {
			result = operations->map(argument[0], argument[1], argument[2],
						 argument[3]);
		} else if (request[0] == UNMAP) {
			result = operations->unmap(argument[0], argument[1]);
		} else if (request[0] == TRANSLATE) {
			result = operations->translate(argument[0]);
		} else if (request[0] == DUMP) {
			dump(operations, narrow);
		} else if (request[0] == TIME) {
			struct work work = {
				argument[0], argument[1], argument[2], argument[3],
			};
			for (u64 i = 0; i < argument[4]; i++)
				put(0);
			result = time_work(operations, &config, &work, argument[4], payload);
		} else if (request[0] == DESTROY) {
			operations->destroy();
			operations = NULL;
			result = taken();
		} else {
			return 1;
		}
		u64 answer[3] = { result, pool_complaints(), payload_words };

		if (fwrite(answer, sizeof answer, 1, stdout) != 1 ||
		    fwrite(payload, sizeof *payload, payload_words, stdout) != payload_words ||
		    fflush(stdout) != 0)
			return 1;
	}
	return 0;
}
