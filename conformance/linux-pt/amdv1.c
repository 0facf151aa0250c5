/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Linux's AMD v1 format a second time, without the options that its own file forces on: a top that
 * grows and the force-coherent bit in every leaf. The names are others, so that both can be linked.
 */
#define pt_iommu_amdv1_init plain_amdv1_init
#define pt_iommu_amdv1_hw_info plain_amdv1_hw_info
#define pt_iommu_amdv1_iova_to_phys plain_amdv1_iova_to_phys
#define pt_iommu_amdv1_read_and_clear_dirty plain_amdv1_read_and_clear_dirty
#define PT_FMT amdv1
#define PT_SUPPORTED_FEATURES \
	(BIT(PT_FEAT_FULL_VA) | BIT(PT_FEAT_AMDV1_FORCE_COHERENCE) | BIT(PT_FEAT_FLUSH_RANGE))
#include "iommu_template.h"
