//! Features of the RISC-V IOMMU alone: directories of several shapes, and an interface by which it can be asked
//! for a translation (section "Translation-request"), also with a PASID, which `edu` does not use.

use anyhow::{Context as _, ensure};
use iommu::{DeviceId, DomainId, Pasid, RiscvIommu, Unit as _, UnitSetupError, riscv::Config};
use iopt::Prot;
use runs::{PageSizes, Span};

use crate::{At, LONGEST, Rig, Seen, case::id, tables::Tables};

use super::expect;

// tr_req_iova, tr_req_ctl, tr_response.
const IOVA: usize = 600;
const CONTROL: usize = 608;
const RESPONSE: usize = 616;
/// tr_req_ctl.Go/Busy, and the fault in tr_response.
const FLAG: u64 = 1;

/// 4 KiB will do.
const PAGES: PageSizes = PageSizes::from_bits(1 << 12);

type Driver<'r> = RiscvIommu<crate::Registers, &'r ioas::HostTables>;

fn driver(rig: &Rig, config: Config) -> Result<Driver<'_>, UnitSetupError> {
    RiscvIommu::new(rig.registers(), rig.structures(), config)
}

/// Asks the unit where an address leads: true when it is `expected`, a multiple of 4 MiB, and for `None` when
/// it leads nowhere.
fn leads(
    driver: &Driver<'_>,
    (device, pasid): (DeviceId, Option<Pasid>),
    iova: u64,
    expected: Option<u64>,
) -> anyhow::Result<()> {
    use iommu::Registers as _;
    let registers = driver.registers();
    // PID and PV.
    let process = pasid.map_or(0, |pasid| u64::from(pasid.0) << 12 | 1 << 32);
    registers.write64(IOVA, iova);
    registers.write64(CONTROL, u64::from(device.0) << 40 | process | FLAG);
    let control = registers.read64(CONTROL);
    ensure!(control & FLAG == 0, "no answer: {control:#x}");
    let response = registers.read64(RESPONSE);
    let right = match expected {
        None => response & FLAG == FLAG,
        Some(address) => {
            let page = address >> 12;
            // QEMU 10.0 has the page number in bits 43:0, and its lowest ten are lost.
            response == page << 10 || response == page
        }
    };
    ensure!(
        right,
        "{device}, {pasid:?}: {response:#x}, not {expected:x?}"
    );
    Ok(())
}

/// Directories of 1 to 3 levels, one after the other on the same unit.
pub(super) fn directories(rig: &Rig) -> anyhow::Result<()> {
    let data = rig.data().start;
    let at = |page: u64| At {
        iova: page << 12,
        address: data + (page << 12),
    };
    for device_bits in [6, 15, 16, 24] {
        let driver = driver(
            rig,
            Config {
                device_bits,
                ..Config::default()
            },
        )?;
        driver.enable()?;
        let table = Tables::new(rig, PAGES)?;
        table.map(0, &[Span::new(data, 2 << 12)], Prot::RW)?;
        let copy = |expected| -> anyhow::Result<()> {
            let seen = rig.copy(0, at(0), at(1), LONGEST)?;
            expect(seen, expected, &format!("{device_bits} bits"))
        };
        copy(Seen::Untouched)?;
        driver.attach(id(0), DomainId(3), table.root())?;
        copy(Seen::Copied)?;
        rig.note([4096; 2]);
        // The last that there is.
        let last = DeviceId((1 << device_bits) - 1);
        let space = (last, None);
        leads(&driver, space, 0, None)?;
        driver.attach(last, DomainId(3), table.root())?;
        leads(&driver, space, 0, Some(data))?;
        driver.detach(last)?;
        leads(&driver, space, 0, None)?;
        driver.detach(id(0))?;
        copy(Seen::Untouched)?;
        driver.tear_down().context("the unit goes on")?;
    }
    rig.finish()
}

/// Process directories of as many levels as QEMU has.
pub(super) fn processes(rig: &Rig) -> anyhow::Result<()> {
    let data = rig.data().start;
    for pasid_bits in [8, 17, 20] {
        let config = Config {
            pasid_bits,
            ..Config::default()
        };
        let driver = driver(rig, config)?;
        let offered = driver.capabilities().pasid_bits;
        ensure!(offered >= 8, "{offered} bits");
        // QEMU 10.0 has PD8 only.
        if offered < pasid_bits {
            driver.tear_down().context("the unit goes on")?;
            continue;
        }
        driver.enable()?;
        let device = id(0);
        let spaces = [
            None,
            Some(Pasid(1)),
            Some(Pasid(0x55)),
            Some(Pasid((1 << pasid_bits) - 1)),
        ];
        // The same address leads each of them elsewhere.
        let address = |nth: usize| data + (nth as u64 + 1) * (4 << 20);
        let mut tables = Vec::new();
        for nth in 0..spaces.len() {
            let table = Tables::new(rig, PAGES)?;
            table.map(0x5000, &[Span::new(address(nth), 4096)], Prot::RW)?;
            tables.push(table);
        }
        let attach = |nth: usize| -> anyhow::Result<()> {
            let (domain, root) = (DomainId(nth as u32 + 1), tables[nth].root());
            match spaces[nth] {
                None => driver.attach(device, domain, root)?,
                Some(pasid) => driver.attach_pasid(device, pasid, domain, root)?,
            }
            Ok(())
        };
        let detach = |nth: usize| -> anyhow::Result<()> {
            match spaces[nth] {
                None => driver.detach(device)?,
                Some(pasid) => driver.detach_pasid(device, pasid)?,
            }
            Ok(())
        };
        let mut attached = [false; 4];
        let compare = |attached: [bool; 4]| -> anyhow::Result<()> {
            for (nth, space) in spaces.into_iter().enumerate() {
                let expected = attached[nth].then(|| address(nth));
                leads(&driver, (device, space), 0x5000, expected)
                    .with_context(|| format!("{pasid_bits} bits, {attached:?}"))?;
            }
            Ok(())
        };
        // Each comes, and goes twice: in the order in which they came, and against it.
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]] {
            for nth in 0..4 {
                attach(nth)?;
                attached[nth] = true;
                compare(attached)?;
            }
            // DMA uses the one without a PASID.
            let at = At {
                iova: 0x5000,
                address: address(0),
            };
            let half = At {
                iova: at.iova + 2048,
                address: at.address + 2048,
            };
            let seen = rig.copy(0, at, half, 2048)?;
            expect(seen, Seen::Copied, "without a PASID")?;
            for nth in order {
                detach(nth)?;
                attached[nth] = false;
                compare(attached)?;
            }
        }
        driver.drain_faults(&mut |_| {});
        driver.tear_down().context("the unit goes on")?;
    }
    rig.finish()
}
