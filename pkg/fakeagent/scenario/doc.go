// Package scenario defines the YAML file that a fake agent plays: Clusters, node groups, how long
// their machines take, which NodePools are published, who may call, and which failures happen when.
//
// [Parse] reads a file. Its error names the field of every mistake. [Scenario.Start] starts a fake
// agent that plays the scenario. [Example] is a scenario that uses every field.
package scenario
