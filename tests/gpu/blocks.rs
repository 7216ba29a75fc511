//! How many blocks the library's grids have.

use crate::{on_gpu, standin};

/// At least one, at most a quarter of what can be resident.
pub fn the_default_leaves_room_for_computation() {
    let gpus = on_gpu::gpus();
    let blocks = gpus.gpu.suitable_blocks().unwrap();
    println!(
        "{}",
        serde_json::json!({"figure": "blocks", "blocks": blocks, "multiprocessors": gpus.gpu.multiprocessors()})
    );
    // Two blocks of the host's size fit a multiprocessor: the kernel is bounded so.
    assert!((1..=24.min(gpus.gpu.multiprocessors() / 2).max(1)).contains(&blocks), "{blocks}");
}

/// Says what the driver's answers make of it.
#[test]
#[ignore = "run by the test below, on the stand-in"]
fn attempt() {
    println!("blocks: {}.", on_gpu::open(0, 0).suitable_blocks().unwrap());
}

/// It follows from what the driver says of the device and of the kernel.
#[test]
fn the_default_follows_the_device() {
    for (multiprocessors, occupancy, blocks) in [(132, 2, 24), (16, 2, 8), (16, 1, 4), (1, 1, 1)] {
        let mut command = standin::command(&["blocks::attempt"]);
        command.env("FL_STANDIN_MULTIPROCESSORS", multiprocessors.to_string());
        command.env("FL_STANDIN_OCCUPANCY", occupancy.to_string());
        let said = standin::said(&standin::output(&mut command));
        assert!(said.contains(&format!("blocks: {blocks}.")), "{said}");
    }
}
