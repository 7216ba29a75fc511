//! A planner that is kept allocates nothing for demands of a size it has seen.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use fuselink::plan::{CostModel, Demand, Method, Planner, Request};
use fuselink::topo::{Cluster, Rank, Server};

/// The system's allocator, and how often each thread asked it for memory.
struct Counting;

thread_local! {
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ASKED.set(ASKED.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on; all memory comes from the system's allocator.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ASKED.set(ASKED.get() + 1);
        // SAFETY: the caller's promises are passed on; all memory comes from the system's allocator.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn planning_again_allocates_nothing() {
    let cluster = Cluster::uniform(8, Server::new(4, &[400_000; 4], 450_000));
    let cells = |salt: u64| (0..32 * 32u64).map(move |i| (i * i + salt) * 7919 % 3_000_017).collect();
    let demands: Vec<Demand> = (0..4).map(|salt| Demand::new(32, cells(salt), 1).unwrap()).collect();
    for method in [Method::Auto, Method::Ordered, Method::OpenShop, Method::Rounds, Method::Loose] {
        let model = CostModel::default();
        let request = Request { method, model, rank: Rank(3), message_bytes: model.message_bytes };
        let mut planner = Planner::new();
        let round = |planner: &mut Planner| {
            for demand in &demands {
                planner.plan(&cluster, demand, &request).unwrap();
                planner.replan(&cluster, demand, &request).unwrap();
            }
        };
        (0..2).for_each(|_| round(&mut planner));
        let before = ASKED.get();
        round(&mut planner);
        assert_eq!(ASKED.get() - before, 0, "{method}");
    }
}
