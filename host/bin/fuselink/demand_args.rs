//! Which demand: a matrix, measured expert loads, a router trace, or a made-up layer.

use std::path::PathBuf;

use anyhow::anyhow;
use clap::Args;
use fuselink::plan::{Demand, DemandError, ExpertLoads, RouterTrace, SyntheticMoe};
use fuselink::topo::Cluster;

use crate::failure::Failure;
use crate::input::read_text;
use crate::memory::check_fits;

/// The demand flags. Without any, a skewed mixture-of-experts layer is made up from the seed.
#[derive(Args, Debug)]
#[command(next_help_heading = "Demand (a made-up mixture-of-experts layer, unless one is named)")]
pub struct DemandArgs {
    /// CSV of bytes: a row per source rank, a column per destination rank; - for standard input
    #[arg(long, value_name = "FILE.csv", group = "source")]
    demand: Option<PathBuf>,
    /// Measured expert loads: {"logical_count": [layers][experts]}; needs --layer
    #[arg(long, value_name = "FILE.json", group = "source", requires = "layer")]
    expert_loads: Option<PathBuf>,
    /// Router trace: JSON lines of step, layer, rank, top_indices
    #[arg(long, value_name = "FILE.jsonl", group = "source")]
    router_trace: Option<PathBuf>,
    /// Layer of the expert loads or the trace [default for a trace: that of its first record]
    #[arg(long, value_name = "L", allow_negative_numbers = true)]
    layer: Option<u64>,
    /// Step of the trace [default: that of its first record]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    step: Option<u64>,
    /// Experts of the traced model [default: the highest seen, up to a multiple of the ranks]
    #[arg(long, value_name = "E", allow_negative_numbers = true)]
    experts: Option<u64>,
    /// Tokens that each rank sends
    #[arg(long, value_name = "T", allow_negative_numbers = true, default_value_t = 512)]
    tokens: u64,
    /// Copies of each token
    #[arg(long, value_name = "K", allow_negative_numbers = true, default_value_t = 8)]
    top_k: u64,
    /// Bytes of a token
    #[arg(long, value_name = "B", allow_negative_numbers = true, default_value_t = 7168)]
    token_bytes: u64,
    /// Seed of the made-up layer
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 1)]
    seed: u64,
    /// Bytes that are never split, such as --token-bytes
    #[arg(long, value_name = "U", allow_negative_numbers = true, default_value_t = 1)]
    unit: u64,
}

impl DemandArgs {
    /// The seed of what is made up.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The demand asked for, of as many ranks as the cluster has.
    pub fn demand(&self, cluster: &Cluster) -> Result<Demand, Failure> {
        if self.unit == 0 {
            return Err(Failure::Input(anyhow!("--unit must be at least 1 byte")));
        }
        let ranks = cluster.ranks();
        let cells = u64::from(ranks) * u64::from(ranks);
        check_fits(&format!("a demand of {ranks} ranks"), cells * size_of::<u64>() as u64)?;
        let demand = match (&self.demand, &self.expert_loads, &self.router_trace) {
            (Some(path), _, _) => {
                let place = path.display().to_string();
                let demand =
                    Demand::from_csv(&read_text(path)?, &place, self.unit).map_err(Failure::input)?;
                self.check_size(demand, cluster, &place)?
            }
            (_, Some(path), _) => {
                let place = path.display().to_string();
                let layer = self.layer.and_then(|l| usize::try_from(l).ok()).unwrap_or(usize::MAX);
                let (tokens, top_k, token_bytes) = (self.tokens, self.top_k, self.token_bytes);
                let loads = ExpertLoads { layer, tokens, top_k, token_bytes };
                self.tokens_of(Demand::from_expert_loads(&read_text(path)?, &place, loads, ranks))?
            }
            (_, _, Some(path)) => {
                let place = path.display().to_string();
                let (step, layer, experts) = (self.step, self.layer, self.experts);
                let trace = RouterTrace { step, layer, experts, token_bytes: self.token_bytes };
                self.tokens_of(Demand::from_router_trace(&read_text(path)?, &place, trace, ranks))?
            }
            _ => {
                let (tokens, top_k, token_bytes) = (self.tokens, self.top_k, self.token_bytes);
                let moe = SyntheticMoe { seed: self.seed, tokens, top_k, token_bytes };
                self.tokens_of(Demand::synthetic_moe(ranks, moe))?
            }
        };
        demand.with_unit(self.unit).map_err(Failure::input)
    }

    fn tokens_of(&self, demand: Result<Demand, DemandError>) -> Result<Demand, Failure> {
        if self.token_bytes == 0 {
            return Err(Failure::Input(anyhow!("--token-bytes must be at least 1")));
        }
        demand.map_err(Failure::input)
    }

    fn check_size(&self, demand: Demand, cluster: &Cluster, place: &str) -> Result<Demand, Failure> {
        let (rows, ranks, servers) = (demand.ranks(), cluster.ranks(), cluster.server_count());
        if rows == ranks {
            return Ok(demand);
        }
        Err(Failure::Input(anyhow!(
            "{place}: {rows} rows, but {servers} servers have {ranks} GPUs in all; see --servers and --gpus"
        )))
    }
}
