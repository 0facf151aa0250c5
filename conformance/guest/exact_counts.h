/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Included by KUnit's suites of generic_pt, whose look for leaks is to see counts that processors still keep to themselves. */
#include <linux/mmzone.h>
#include <linux/vmstat.h>

static unsigned long exact_node_page_state(enum node_stat_item item)
{
	long sum = global_node_page_state(item);
	pg_data_t *node;
	int cpu;

	for_each_online_pgdat(node)
		for_each_online_cpu(cpu)
			sum += per_cpu_ptr(node->per_cpu_nodestats, cpu)->vm_node_stat_diff[item];
	return sum;
}
#define global_node_page_state exact_node_page_state
