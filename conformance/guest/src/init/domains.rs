//! One address space of the kernel for devices of two nodes: one domain, or one for each node where the kernel has our
//! patch (`linux/patches/node-domains.c`) and its option is on.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Context as _, ensure};
use guest::machines::Machine;
use hostmem::Backing;
use ioas::{Ioas, Ledger};
use iopt::Prot;
use runs::Span;

use crate::{
    charges::Count,
    containers::{User, attach, detach},
    dma::{self, IOVA},
    edu::BUFFER,
    numa, program,
    semantics::counter_of,
    space::{Interface, host_memory},
};

/// Where a kernel with the patch has the option.
const OPTION: &str = "/sys/module/iommu/parameters/node_domains";
/// Bytes that are mapped.
const SIZE: u64 = 4 << 20;

/// Does `what` as the kernel is, and, where it has the option, with that on.
fn off_and_on(what: impl Fn(bool) -> anyhow::Result<()>) -> anyhow::Result<()> {
    if !Path::new(OPTION).exists() {
        return what(false);
    }
    let before = fs::read_to_string(OPTION)?;
    ensure!(before.trim() == "N", "{OPTION} is {before}");
    what(false).context("off")?;
    fs::write(OPTION, "Y")?;
    let done = what(true).context("on");
    fs::write(OPTION, "N")?;
    done
}

/// Devices share a domain if they may, and all reach the same memory, which is charged once.
pub(crate) fn in_one_space<I: Interface>(_: &Machine) -> anyhow::Result<()> {
    off_and_on(|by_node| {
        let count = Count::new(counter_of(I::COLUMN))?;
        let file = I::file()?;
        let space = Ioas::over_mapper(I::mapper(&file)?);
        let mapping = dma::memory(Backing::Anon4K, SIZE)?;
        let memory = host_memory(&mapping, &Ledger::unlimited())?;
        space.map(IOVA, &memory, Span::new(0, SIZE), Prot::RW)?;
        let mut devices = numa::devices()?;
        // The first that comes says where the tables lie, and when the last one has left the next says it anew.
        for round in 0..2 {
            let first = devices[0].0;
            let mut users = Vec::new();
            let mut found: Vec<(u32, BTreeSet<u64>)> = Vec::new();
            for (node, device) in &devices {
                users.push(attach::<I>(&file, &space, *device, None)?);
                let node = if by_node { *node } else { first };
                let tables = numa::tables_of(*device)?;
                numa::lie_on(node, &tables).with_context(|| format!("{}, {round}", device.0))?;
                for (other, theirs) in &found {
                    let shared = tables.intersection(theirs).count();
                    let expected = if *other == node { tables.len() } else { 0 };
                    ensure!(shared == expected, "{shared} tables are shared");
                }
                found.push((node, tables));
            }
            count.is(SIZE)?;
            copy_on(&users)?;
            dma::check(mapping.cells(), |nth| {
                let words = BUFFER / 8;
                if nth / words <= 4 { nth % words } else { nth }
            })?;
            // Devices of the other node stay, and see the memory.
            let rest = users.split_off(2);
            users
                .into_iter()
                .try_for_each(|user| detach(&space, user))?;
            count.is(SIZE)?;
            copy_on(&rest)?;
            rest.into_iter().try_for_each(|user| detach(&space, user))?;
            devices.reverse();
        }
        space.close()?;
        count.is(0)
    })
}

/// Each device copies: what one has written the next one reads.
fn copy_on<I: Interface>(users: &[User<I>]) -> anyhow::Result<()> {
    for (user, at) in users.iter().zip((IOVA..).step_by(BUFFER as usize)) {
        user.edu.read(at, BUFFER)?;
        user.edu.write(at + BUFFER, BUFFER)?;
    }
    Ok(())
}

/// `dmaspace explain --machine` reports tables that are far from devices, with the kernel's option where there is one.
pub(crate) fn reported(_: &Machine) -> anyhow::Result<()> {
    let has = Path::new(OPTION).exists();
    off_and_on(|by_node| {
        let report = program::report(&["explain", "--machine"])?;
        let findings = report["findings"].as_array().context("no findings")?;
        let far = findings
            .iter()
            .find(|finding| finding["cause"] == "group.far-unit");
        ensure!(far.is_none() == by_node, "{findings:?}");
        let setting = far.and_then(|far| far["advice"][0].as_str());
        let named = setting.is_some_and(|setting| setting.contains("iommu.node_domains=1"));
        ensure!(named == (has && !by_node), "{setting:?}");
        Ok(())
    })
}
