package sandbox

// SPIFFE IDs that the sandbox's agent knows besides those of Clusters.
const (
	// AdminIdentity may call everything for every Cluster.
	AdminIdentity = "spiffe://" + trustDomain + "/admin"
	// ReaderIdentity may read what there is for every Cluster.
	ReaderIdentity = "spiffe://" + trustDomain + "/reader"
)

// agentPolicy gives these identities their roles.
const agentPolicy = `identities:
- id: ` + AdminIdentity + `
  roles: [admin]
  allClusters: true
- id: ` + ReaderIdentity + `
  roles: [reader]
  allClusters: true
`
