//! One walk, explained.

use crate::tables::{Outcome, Tables, explain};
use iopt::Prot;

use crate::tables::tests::images::{each_format, image, parsed, sample};

const GIB: u64 = 1 << 30;

#[test]
fn the_entries_on_the_way_are_shown_with_their_fields() {
    let (bytes, root) = image("vtd-ss", &[(GIB, 3 * GIB, 4096, Prot::READ)]);
    let found = explain(&Tables::of_image(parsed(&bytes)), GIB + 0x123);
    let way: Vec<_> = found
        .steps
        .iter()
        .map(|step| (step.level, step.index))
        .collect();
    assert_eq!(way, [(3, 0), (2, 1), (1, 0), (0, 0)]);
    assert_eq!(found.steps[0].table, root.address);
    for pair in found.steps.windows(2) {
        assert_eq!(pair[0].word & 0x000f_ffff_ffff_f000, pair[1].table);
        assert_eq!(pair[1].address, pair[1].table + 8 * pair[1].index);
    }
    let leaf = &found.steps[3];
    let field = |name: &str| leaf.fields.iter().find(|field| field.name == name).unwrap();
    assert_eq!(field("address").meaning, format!("{:#x}", 3 * GIB));
    assert_eq!(field("W").meaning, "writing is not allowed");
    assert_eq!(field("R").source, "VT-d 5.0, 9.8 and 3.7");
    assert_eq!(
        found.read,
        Outcome::Translated {
            pa: 3 * GIB + 0x123,
            page_iova: GIB,
            page_pa: 3 * GIB,
            page_bytes: 4096,
            prot: "r--".into(),
        }
    );
    let Outcome::Faults {
        reason,
        level,
        event,
    } = found.write
    else {
        panic!("it may not be written");
    };
    assert!(reason.ends_with("leaves only r--"), "{reason}");
    assert_eq!(level, 0);
    assert_eq!(event.unwrap().name, "fault reason 0x5 (legacy mode)");

    let absent = explain(&Tables::of_image(parsed(&bytes)), GIB + 4096);
    assert_eq!(absent.steps.len(), 4);
    let Outcome::Faults { reason, event, .. } = absent.read else {
        panic!("it is not mapped");
    };
    assert!(reason.ends_with("is not present"), "{reason}");
    assert_eq!(event.unwrap().name, "fault reason 0x6 (legacy mode)");

    let outside = explain(&Tables::of_image(parsed(&bytes)), 1 << 48);
    assert_eq!(outside.steps, []);
    assert!(
        matches!(outside.read, Outcome::Faults { ref reason, .. } if reason.contains("outside"))
    );
}

#[test]
fn every_format_is_explained_down_to_the_byte() {
    each_format(|name, image, root| {
        let tables = Tables::of_image(parsed(image));
        for (iova, pa, bytes, prot) in sample(name) {
            let at = iova + bytes - 5;
            let found = explain(&tables, at);
            let Outcome::Translated {
                pa: to,
                page_iova,
                page_pa,
                page_bytes,
                ..
            } = found.read
            else {
                panic!("{name} {at:#x}: {:?}", found.read);
            };
            assert_eq!(to, pa + bytes - 5, "{name}");
            assert_eq!(page_pa + (at - page_iova), to, "{name}");
            assert!(at - page_iova < page_bytes, "{name}");
            let writes = matches!(found.write, Outcome::Translated { .. });
            assert_eq!(writes, prot.contains(Prot::WRITE), "{name}");
            // From the root down, each table where the entry above leads.
            assert_eq!(found.steps[0].level + 1, root.levels, "{name}");
            for step in &found.steps {
                assert!(!step.fields.is_empty(), "{name} {step:?}");
                let address = step.fields.iter().find(|field| field.name == "address");
                let address =
                    address.or_else(|| step.fields.iter().find(|field| field.name == "PPN"));
                assert!(address.is_some(), "{name} {step:?}");
            }
            let last = found.steps.last().unwrap();
            assert!(
                last.fields.iter().all(|field| !field.wrong),
                "{name} {last:?}"
            );
        }
    });
}
