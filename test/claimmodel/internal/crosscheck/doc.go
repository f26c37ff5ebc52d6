// Package crosscheck runs the same scripts against the explored model and the real Cluster API. The
// model must allow every outcome of the real controllers.
//
// For each phase the model computes all possible outcomes, from every situation that matches the
// real outcomes of the earlier phases. No agent runs; the scripts contain the writes of agents,
// users and others.
package crosscheck
