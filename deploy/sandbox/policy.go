package sandbox

// SPIFFE IDs that the sandbox's agent accepts in addition to those of Clusters.
const (
	// AdminIdentity may call every method for every Cluster.
	AdminIdentity = "spiffe://" + trustDomain + "/admin"
	// ReaderIdentity may call every read method for every Cluster.
	ReaderIdentity = "spiffe://" + trustDomain + "/reader"
	// AutoscalerIdentity may call as the cluster-autoscaler of the spoke's default Cluster.
	AutoscalerIdentity = "spiffe://" + trustDomain + "/cluster-autoscaler/" + ClusterNamespace + "/" + ClusterName
)

// agentPolicy grants these identities their roles.
const agentPolicy = `identities:
- id: ` + AdminIdentity + `
  roles: [admin]
  allClusters: true
- id: ` + ReaderIdentity + `
  roles: [reader]
  allClusters: true
- id: ` + AutoscalerIdentity + `
  roles: [autoscaler]
  clusters: [` + ClusterNamespace + `/` + ClusterName + `]
`
