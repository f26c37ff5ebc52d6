// Package scenario is what a fake agent plays, as a YAML file: Clusters, node groups, how long their machines take, who may call, and what goes wrong
// and when.
//
// [Parse] reads a file and names every mistake in it by its field. [Scenario.Start] starts a fake agent that plays it. [Example] is a scenario that
// uses every field.
package scenario
