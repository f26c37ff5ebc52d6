// Package crosscheck does the same scripts to the explored model and to the real Cluster API: whatever the real controllers make
// of a script, the model must allow.
//
// The model says all that may come of a phase, from every situation in which what came of the phases before it is what the real
// controllers made of them. No agent runs; what an agent, people and others write is in the scripts.
package crosscheck
